# cython: language_level=3, boundscheck=False, wraparound=False
"""Adapter to UCX: contexts, workers, registered memory, endpoints, and puts of many pieces as one call.

Its only user is rpc/transports/ucx.py. No function waits or retries; an error status becomes UcxError. A
Worker and its Endpoints belong to one thread; a Context and its Slabs may be used by all threads (they are
made with shared workers).
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from posix.unistd cimport getpid

cdef extern from "_ucx_abi.h":
    ctypedef struct nv_params:
        uint64_t field_mask, features
        int mt_workers_shared
    ctypedef struct nv_worker_params:
        uint64_t field_mask
        int thread_mode
    ctypedef struct nv_map_params:
        uint64_t field_mask
        size_t length
        unsigned flags
    ctypedef struct nv_mem_attr:
        uint64_t field_mask
        void *address
    ctypedef struct nv_err_handler "err_handler":
        void (*cb)(void *, void *, int)
        void *arg
    ctypedef struct nv_ep_params:
        uint64_t field_mask
        const void *address
        int err_mode
        nv_err_handler err_handler
    ctypedef struct nv_request_param:
        uint32_t op_attr_mask, flags
    int NV_PARAM_FEATURES, NV_PARAM_SHARED, NV_FEATURE_RMA, NV_FEATURE_WAKEUP, NV_WORKER_THREAD_MODE, NV_MAP_LENGTH
    int NV_MAP_FLAGS, NV_MAP_ALLOCATE, NV_MEM_ADDRESS, NV_EP_ADDRESS, NV_EP_ERR_MODE, NV_EP_ERR_HANDLER, NV_ERR_NONE
    int NV_ERR_PEER, NV_OP_FLAGS, NV_CLOSE_FORCE, NV_IN_PROGRESS, NV_BUSY
    const char *nv_load(const char *, const char *, const char *) nogil
    int nv_is_pointer(void *) nogil
    void *nv_put_all(void *, const char **, const size_t *, size_t, uint64_t, void *) nogil
    void nv_on_error(void *, void *, int) nogil
    int p_ucp_init_version(unsigned, unsigned, const nv_params *, const void *, void **) nogil
    void p_ucp_cleanup(void *) nogil
    int p_ucp_config_read(const char *, const char *, void **)
    int p_ucp_config_modify(void *, const char *, const char *)
    void p_ucp_config_release(void *)
    const char *p_ucp_get_version_string()
    int p_ucp_worker_create(void *, const nv_worker_params *, void **) nogil
    void p_ucp_worker_destroy(void *) nogil
    int p_ucp_worker_get_address(void *, void **, size_t *)
    void p_ucp_worker_release_address(void *, void *)
    int p_ucp_worker_get_efd(void *, int *)
    int p_ucp_worker_arm(void *)
    unsigned p_ucp_worker_progress(void *) nogil
    int p_ucp_mem_map(void *, const nv_map_params *, void **) nogil
    int p_ucp_mem_unmap(void *, void *) nogil
    int p_ucp_mem_query(void *, nv_mem_attr *)
    int p_ucp_rkey_pack(void *, void *, void **, size_t *)
    void p_ucp_rkey_buffer_release(void *)
    int p_ucp_ep_create(void *, const nv_ep_params *, void **) nogil
    int p_ucp_ep_rkey_unpack(void *, const void *, void **)
    int p_ucp_rkey_ptr(void *, uint64_t, void **)
    void p_ucp_rkey_destroy(void *)
    void *p_ucp_ep_close_nbx(void *, const nv_request_param *) nogil
    int p_ucp_request_check_status(void *) nogil
    void p_ucp_request_free(void *) nogil
    const char *p_ucs_status_string(int)

cdef int loaded = 0  # id of the process that loaded UCX: a forked child must not touch it, since its parent uses it
CLOSE_TURNS = 20_000
"""Most progress calls for a forced close, which only frees local resources."""


class UcxError(Exception):
    """Error status of UCX; never raised beyond rpc/transports/ucx.py."""


cdef int check(int status, str what) except -1:
    if status:
        raise UcxError(f"{what}: {p_ucs_status_string(status).decode()}")
    return 0


def load(str ucs, str uct, str ucp):
    """Load UCX from these three libraries, once. UcxError: names a missing function."""
    global loaded
    cdef const char *missing
    if not loaded:
        missing = nv_load(ucs.encode(), uct.encode(), ucp.encode())
        if missing != NULL:
            raise UcxError((<bytes>missing).decode())
        loaded = getpid()


cdef inline bint ours() noexcept:
    return loaded == getpid()


def version():
    return p_ucp_get_version_string().decode()


cdef class Context:
    """UCX context with these settings (name without UCX_, value). UcxError: an unknown setting."""
    cdef void *at

    def __init__(self, settings):
        cdef void *config = NULL
        cdef nv_params params
        cdef int status
        if not loaded:
            raise UcxError("UCX is not loaded")
        check(p_ucp_config_read(NULL, NULL, &config), "settings")
        try:
            for name, value in settings.items():
                check(p_ucp_config_modify(config, name.encode(), value.encode()), f"{name}={value}")
            memset(&params, 0, sizeof(params))
            params.field_mask = NV_PARAM_FEATURES | NV_PARAM_SHARED
            params.features = NV_FEATURE_RMA | NV_FEATURE_WAKEUP
            params.mt_workers_shared = 1
            with nogil:
                status = p_ucp_init_version(1, 13, &params, config, &self.at)
            check(status, "no device")
        finally:
            p_ucp_config_release(config)

    def __dealloc__(self):
        if self.at != NULL and ours():
            p_ucp_cleanup(self.at)


cdef class Slab:
    """Registered memory that peers with its key can write to.

    The memory stays registered as long as any object refers to the slab."""
    cdef Context context
    cdef void *handle
    cdef char *base
    cdef readonly size_t length

    def __init__(self, Context context, size_t length):
        cdef nv_map_params params
        cdef nv_mem_attr attr
        cdef int status
        memset(&params, 0, sizeof(params))
        params.field_mask = NV_MAP_LENGTH | NV_MAP_FLAGS
        params.length, params.flags = length, NV_MAP_ALLOCATE
        self.context, self.length = context, length
        with nogil:
            status = p_ucp_mem_map(context.at, &params, &self.handle)
        check(status, f"registering {length} bytes")
        memset(&attr, 0, sizeof(attr))
        attr.field_mask = NV_MEM_ADDRESS
        check(p_ucp_mem_query(self.handle, &attr), "registered memory")
        self.base = <char *>attr.address

    @property
    def address(self):
        return <uint64_t>self.base

    def key(self):
        cdef void *raw = NULL
        cdef size_t length = 0
        check(p_ucp_rkey_pack(self.context.at, self.handle, &raw, &length), "key of registered memory")
        try:
            return (<char *>raw)[:length]
        finally:
            p_ucp_rkey_buffer_release(raw)

    def __dealloc__(self):
        if self.handle != NULL and ours():
            p_ucp_mem_unmap(self.context.at, self.handle)


cdef class Region:
    """Part of a Slab for one payload, reused when nothing refers to it.

    The references include memoryviews. `home` is the list that receives the offset, from which the part is
    handed out again; set `home` to None to prevent that.
    """
    cdef readonly Slab slab
    cdef readonly size_t offset, length
    cdef public object home
    cdef public object key

    def __init__(self, Slab slab, size_t offset, size_t length, home, key):
        if offset + length > slab.length:
            raise ValueError("outside of its memory")
        self.slab, self.offset, self.length, self.home, self.key = slab, offset, length, home, key

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.slab.base + self.offset, self.length, 0, flags)

    def __releasebuffer__(self, Py_buffer *view):
        pass

    def __del__(self):
        home, self.home = self.home, None
        if home is not None:
            home.append((self.key, self.slab, self.offset))


cdef class UcxWorker:
    cdef readonly Context context
    cdef void *at

    def __init__(self, Context context):
        cdef nv_worker_params params
        cdef int status
        memset(&params, 0, sizeof(params))
        params.field_mask = NV_WORKER_THREAD_MODE  # 0: one thread
        self.context = context
        with nogil:
            status = p_ucp_worker_create(context.at, &params, &self.at)
        check(status, "worker")

    def address(self):
        cdef void *raw = NULL
        cdef size_t length = 0
        check(p_ucp_worker_get_address(self.at, &raw, &length), "address")
        try:
            return (<char *>raw)[:length]
        finally:
            p_ucp_worker_release_address(self.at, raw)

    def descriptor(self):
        cdef int fd = -1
        check(p_ucp_worker_get_efd(self.at, &fd), "events")
        return fd

    def progress(self, int turns):
        """Make progress, at most `turns` times.

        Return True if nothing is left and the descriptor will signal more.
        """
        cdef int at
        if self.at == NULL or not ours():
            return True
        for at in range(turns):
            if not p_ucp_worker_progress(self.at) and p_ucp_worker_arm(self.at) != NV_BUSY:
                return True
        return False

    def spin(self, UcxFlush flush, int turns):
        """Make progress until `flush` has ended, at most `turns` times; return whether it has ended."""
        cdef int at
        for at in range(turns):
            if flush.ended():
                return True
            p_ucp_worker_progress(self.at)
        return flush.ended()

    def close(self):
        """Destroy the worker: afterwards nothing arrives through it. Its Endpoints must be closed before."""
        if self.at != NULL:
            if ours():
                with nogil:
                    p_ucp_worker_destroy(self.at)
            self.at = NULL

    def __dealloc__(self):
        if self.at != NULL and ours():
            p_ucp_worker_destroy(self.at)


cdef class RemoteKey:
    """Key to memory [base, base + length) of the peer, through one Endpoint."""
    cdef void *at
    cdef uint64_t base, length
    cdef UcxEndpoint endpoint
    cdef int windows
    cdef bint dropped

    def __init__(self, UcxEndpoint endpoint, bytes raw, uint64_t base, uint64_t length):
        self.endpoint, self.base, self.length = endpoint, base, length
        check(p_ucp_ep_rkey_unpack(endpoint.at, <const char *>raw, &self.at), "key")

    def window(self, uint64_t offset, size_t length):
        """View of that part of the memory, or None.

        None: this process cannot access the memory directly; it can for shared memory."""
        cdef void *here = NULL
        cdef Window window
        if self.at == NULL or self.dropped or not ours() or offset > self.length or length > self.length - offset:
            return None
        if p_ucp_rkey_ptr(self.at, self.base + offset, &here) or here == NULL:
            return None
        window = Window.__new__(Window)
        window.base, window.length, window.key = <char *>here, length, self
        self.windows += 1
        return memoryview(window)

    def drop(self):
        """Stop writing with this key. The memory stays mapped while a window on it is in use."""
        self.dropped = True
        if self.at != NULL and not self.windows and self.endpoint.worker.at != NULL and ours():
            p_ucp_rkey_destroy(self.at)
            self.at = NULL

    def __dealloc__(self):
        if self.at != NULL and self.endpoint.at != NULL and self.endpoint.worker.at != NULL and ours():
            p_ucp_rkey_destroy(self.at)


cdef class Window:
    """Memory of the peer that this process can write to directly.

    The window stays valid after the peer has gone or its key was dropped; bytes written then reach nobody.
    """
    cdef RemoteKey key
    cdef char *base
    cdef size_t length

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.base, self.length, 0, flags)

    def __releasebuffer__(self, Py_buffer *view):
        pass

    def __del__(self):
        self.key.windows -= 1
        if self.key.dropped:
            self.key.drop()


cdef class UcxFlush:
    """Completion of a batch of puts. It keeps the sent buffers alive."""
    cdef void *request
    cdef object kept
    cdef readonly str error

    def ended(self):
        """Return True when all has arrived or has failed. Then `error` gives the reason of a failure."""
        cdef int status
        if self.request != NULL:
            status = p_ucp_request_check_status(self.request)
            if status == NV_IN_PROGRESS:
                return False
            p_ucp_request_free(self.request)
            self.request, self.kept = NULL, None
            if status:
                self.error = p_ucs_status_string(status).decode()
        return True

    def __dealloc__(self):
        if self.request != NULL and ours():
            p_ucp_request_free(self.request)


cdef class UcxEndpoint:
    """Endpoint to a peer's worker.

    `peer_errors`: UCX reports the death of the peer; not all its transports can.
    """
    cdef readonly UcxWorker worker
    cdef void *at
    cdef int *status

    def __init__(self, UcxWorker worker, bytes address, bint peer_errors):
        cdef nv_ep_params params
        cdef int status
        self.worker = worker
        self.status = <int *>malloc(sizeof(int))
        if self.status == NULL:
            raise MemoryError
        self.status[0] = 0
        memset(&params, 0, sizeof(params))
        params.field_mask = NV_EP_ADDRESS | NV_EP_ERR_MODE | NV_EP_ERR_HANDLER
        params.address = <const char *>address
        params.err_mode = NV_ERR_PEER if peer_errors else NV_ERR_NONE
        params.err_handler.cb, params.err_handler.arg = nv_on_error, self.status
        with nogil:
            status = p_ucp_ep_create(worker.at, &params, &self.at)
        check(status, "endpoint")

    @property
    def failed(self):
        """Error that UCX has reported for this endpoint, or ""."""
        return p_ucs_status_string(self.status[0]).decode() if self.status[0] else ""

    def put(self, RemoteKey key, uint64_t offset, parts):
        """Write `parts`, one after the other, to `offset` of the key's memory; return their Flush.

        The parts must not change until the Flush has ended. UcxError: the rest will not be written, but a
        part may have been.
        """
        cdef size_t count = len(parts), at = 0, total = 0
        cdef const char **pieces = <const char **>malloc(count * sizeof(char *) + 1)
        cdef size_t *lengths = <size_t *>malloc(count * sizeof(size_t) + 1)
        cdef Py_buffer view
        cdef void *request
        cdef UcxFlush flush
        if pieces == NULL or lengths == NULL:
            free(pieces)
            free(lengths)
            raise MemoryError
        try:
            for part in parts:
                PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)
                pieces[at], lengths[at] = <const char *>view.buf, view.len
                at += 1
                total += view.len
                PyBuffer_Release(&view)
            if self.at == NULL or key.at == NULL or key.dropped or key.endpoint is not self:
                raise UcxError("the key is not valid any more")
            if self.status[0]:
                raise UcxError(self.failed)
            if offset > key.length or total > key.length - offset:
                raise UcxError("outside of the memory that the key is for")
            with nogil:
                request = nv_put_all(self.at, pieces, lengths, count, key.base + offset, key.at)
        finally:
            free(pieces)
            free(lengths)
        flush = UcxFlush.__new__(UcxFlush)
        if nv_is_pointer(request):
            flush.request, flush.kept = request, parts
        elif request != NULL:
            raise UcxError(p_ucs_status_string(<int><Py_ssize_t>request).decode())
        return flush

    def close(self):
        """Cancel pending operations and close the endpoint. Its keys must be dropped before."""
        cdef nv_request_param params
        cdef void *request
        cdef int turn
        if self.at == NULL or self.worker.at == NULL or not ours():
            return
        memset(&params, 0, sizeof(params))
        params.op_attr_mask, params.flags = NV_OP_FLAGS, NV_CLOSE_FORCE
        request = p_ucp_ep_close_nbx(self.at, &params)
        self.at = NULL
        if nv_is_pointer(request):
            for turn in range(CLOSE_TURNS):
                if p_ucp_request_check_status(request) != NV_IN_PROGRESS:
                    break
                p_ucp_worker_progress(self.worker.at)
            p_ucp_request_free(request)

    def __dealloc__(self):
        # An endpoint that is not closed ends with its worker. Only that worker's progress calls the callback.
        if self.status != NULL and (self.at == NULL or self.worker is None or self.worker.at == NULL):
            free(self.status)
