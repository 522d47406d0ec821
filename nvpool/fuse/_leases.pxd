# cython: language_level=3
"""What compiled modules of a mount look up in client/leases."""

from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject


cdef inline object held_lease(dict lent, object inode, double now_s):
    """As Leases.held."""
    cdef PyObject *found = PyDict_GetItem(lent, inode)
    cdef double until_s
    if found is NULL:
        return None
    lease = <object>found
    until_s = (<tuple>lease)[0]
    if now_s >= until_s:
        return None
    watch = (<tuple>lease)[3]
    until_s = watch.until_s
    if now_s >= until_s:
        return None
    watch.used = True
    return lease
