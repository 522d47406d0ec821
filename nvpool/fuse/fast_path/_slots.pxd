# cython: language_level=3, boundscheck=False, wraparound=False
"""Access of compiled modules to attributes of client objects whose classes have __slots__; see core/_slots.h.

Only for objects of exactly that class, not of a subclass.
"""

from cpython.ref cimport PyObject

cdef extern from "_slots.h":
    Py_ssize_t place_of_slot(PyObject *type, PyObject *name)
    PyObject *slot(PyObject *of, Py_ssize_t place)
    void set_slot(PyObject *of, Py_ssize_t place, PyObject *value)
    PyObject *born_as(PyObject *pattern, const Py_ssize_t *places, Py_ssize_t count)


cdef inline Py_ssize_t place(object type, str name) except -1:
    cdef Py_ssize_t found = place_of_slot(<PyObject *>type, <PyObject *>name)
    if found <= 0:
        raise ImportError(f"{type.__name__} has no slot {name}")
    return found


cdef inline object get(object of, Py_ssize_t where):
    cdef PyObject *found = slot(<PyObject *>of, where)
    if found is NULL:
        raise AttributeError("a slot was never set")
    return <object>found


cdef inline void assign(object of, Py_ssize_t where, object value) noexcept:
    set_slot(<PyObject *>of, where, <PyObject *>value)
