/* Direct access to attributes of Python objects with __slots__, by their offset in the object.

   A look-up by name costs 40 ns for each attribute, and creating an object with __init__ more than a
   microsecond. */

#ifndef NVPOOL_BASE_SLOTS_H
#define NVPOOL_BASE_SLOTS_H

#include <Python.h>
#include <structmember.h>

/* Offset of the slot `name` in objects of `type`; -1 if the type has no such slot. */
static inline Py_ssize_t place_of_slot(PyObject *type, PyObject *name)
{
    PyObject *found = PyType_Check(type) ? PyDict_GetItem(((PyTypeObject *)type)->tp_dict, name) : NULL;
    PyMemberDef *member;
    if (!found || !Py_IS_TYPE(found, &PyMemberDescr_Type))
        return -1;
    member = ((PyMemberDescrObject *)found)->d_member;
    return member->type == T_OBJECT_EX && !member->flags ? member->offset : -1;
}

/* Value of a slot: a borrowed reference, or NULL if the slot was never set. */
static inline PyObject *slot(PyObject *of, Py_ssize_t place)
{
    return *(PyObject **)((char *)of + place);
}

static inline void set_slot(PyObject *of, Py_ssize_t place, PyObject *value)
{
    PyObject **at = (PyObject **)((char *)of + place), *before = *at;
    Py_INCREF(value);
    *at = value;
    Py_XDECREF(before);
}

/* New object of the type of `pattern`, with copies of the slot values of `pattern`. The type must have
   exactly these slots. Returns NULL with a Python error set if the object cannot be allocated. */
static inline PyObject *born_as(PyObject *pattern, const Py_ssize_t *places, Py_ssize_t count)
{
    PyTypeObject *type = Py_TYPE(pattern);
    PyObject *born = type->tp_alloc(type, 0);
    Py_ssize_t number;
    if (born)
        for (number = 0; number < count; number++) {
            PyObject *value = slot(pattern, places[number]);
            Py_XINCREF(value);
            *(PyObject **)((char *)born + places[number]) = value;
        }
    return born;
}

#endif
