# cython: language_level=3
"""Lease look-ups of compiled modules in client/state/leases."""

from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject

from nvpool.fuse.fast_path._slots cimport assign, get


cdef inline object held_lease(dict leases_by_inode, object inode, double now_s, object watch_type, Py_ssize_t until_place,
                              Py_ssize_t used_place):
    """Compiled `Leases.held`. `watch_type`: leases.ShardWatch, with the places of its slots until_s and
    used."""
    cdef PyObject *found = PyDict_GetItem(leases_by_inode, inode)
    cdef double until_s
    if found is NULL:
        return None
    lease = <object>found
    until_s = (<tuple>lease)[0]
    if now_s >= until_s:
        return None
    watch = (<tuple>lease)[3]
    if type(watch) is not watch_type:
        return None
    until_s = get(watch, until_place)
    if now_s >= until_s:
        return None
    assign(watch, used_place, True)
    return lease
