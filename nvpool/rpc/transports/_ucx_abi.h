/* The part of UCX's C interface that nvpool uses (libucp.so.0, UCX 1.13 and later; https://openucx.org, BSD
 * 3-Clause). Declared here so that the module compiles without UCX and loads the library that it finds at run
 * time. Layouts and numbers are those of ucp/api/ucp.h, whose structs only grow at their ends;
 * tests/unit/test_ucx_abi.py compares them with the headers of the wheel. */
#ifndef NVPOOL_UCX_ABI_H
#define NVPOOL_UCX_ABI_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    uint64_t field_mask, features;
    size_t request_size;
    void *request_init, *request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps, estimated_num_ppn;
    const char *name;
    size_t node_local_id;
} nv_params;
enum { NV_PARAM_FEATURES = 1, NV_PARAM_SHARED = 1 << 5, NV_FEATURE_RMA = 1 << 1, NV_FEATURE_WAKEUP = 1 << 4 };

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    char rest[256]; /* fields that the mask does not select */
} nv_worker_params;
enum { NV_WORKER_THREAD_MODE = 1 };

typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags, prot;
    int memory_type;
    const void *exported;
} nv_map_params;
enum { NV_MAP_LENGTH = 1 << 1, NV_MAP_FLAGS = 1 << 2, NV_MAP_ALLOCATE = 1 << 1 };

typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    int memory_type;
    char rest[64];
} nv_mem_attr;
enum { NV_MEM_ADDRESS = 1 };

typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    struct { void (*cb)(void *arg, void *ep, int status); void *arg; } err_handler;
    void *user_data;
    unsigned flags;
    char rest[128];
} nv_ep_params;
enum { NV_EP_ADDRESS = 1, NV_EP_ERR_MODE = 2, NV_EP_ERR_HANDLER = 4, NV_ERR_NONE = 0, NV_ERR_PEER = 1 };

typedef struct {
    uint32_t op_attr_mask, flags;
    void *request, *cb;
    uint64_t datatype;
    void *user_data, *reply_buffer;
    int memory_type;
    void *recv_info, *memh;
    char rest[64];
} nv_request_param;
enum { NV_OP_FLAGS = 1 << 4, NV_CLOSE_FORCE = 1 };
enum { NV_OK = 0, NV_IN_PROGRESS = 1, NV_BUSY = -15, NV_ERROR_LAST = -100 };

#define NV_FUNCTIONS(F) \
    F(int, ucp_init_version, (unsigned, unsigned, const nv_params *, const void *, void **)) \
    F(void, ucp_cleanup, (void *)) \
    F(int, ucp_config_read, (const char *, const char *, void **)) \
    F(int, ucp_config_modify, (void *, const char *, const char *)) \
    F(void, ucp_config_release, (void *)) \
    F(const char *, ucp_get_version_string, (void)) \
    F(int, ucp_worker_create, (void *, const nv_worker_params *, void **)) \
    F(void, ucp_worker_destroy, (void *)) \
    F(int, ucp_worker_get_address, (void *, void **, size_t *)) \
    F(void, ucp_worker_release_address, (void *, void *)) \
    F(int, ucp_worker_get_efd, (void *, int *)) \
    F(int, ucp_worker_arm, (void *)) \
    F(unsigned, ucp_worker_progress, (void *)) \
    F(int, ucp_mem_map, (void *, const nv_map_params *, void **)) \
    F(int, ucp_mem_unmap, (void *, void *)) \
    F(int, ucp_mem_query, (void *, nv_mem_attr *)) \
    F(int, ucp_rkey_pack, (void *, void *, void **, size_t *)) \
    F(void, ucp_rkey_buffer_release, (void *)) \
    F(int, ucp_ep_create, (void *, const nv_ep_params *, void **)) \
    F(int, ucp_ep_rkey_unpack, (void *, const void *, void **)) \
    F(int, ucp_rkey_ptr, (void *, uint64_t, void **)) \
    F(void, ucp_rkey_destroy, (void *)) \
    F(void *, ucp_put_nbx, (void *, const void *, size_t, uint64_t, void *, const nv_request_param *)) \
    F(void *, ucp_ep_flush_nbx, (void *, const nv_request_param *)) \
    F(void *, ucp_ep_close_nbx, (void *, const nv_request_param *)) \
    F(int, ucp_request_check_status, (void *)) \
    F(void, ucp_request_free, (void *))

#define NV_DECLARE(result, name, arguments) static result (*p_##name) arguments;
NV_FUNCTIONS(NV_DECLARE)
static const char *(*p_ucs_status_string)(int);

static int nv_is_pointer(void *request) { return (uintptr_t)request - 1 < (uintptr_t)(intptr_t)NV_ERROR_LAST - 1; }

/* Load the libraries; return NULL on success, else the name of a missing function or dlopen's error. */
static const char *nv_load(const char *ucs_path, const char *uct_path, const char *ucp_path)
{
    void *ucs = dlopen(ucs_path, RTLD_NOW | RTLD_LOCAL);
    void *uct = ucs ? dlopen(uct_path, RTLD_NOW | RTLD_LOCAL) : NULL;
    void *ucp = uct ? dlopen(ucp_path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!ucp)
        return dlerror();
#define NV_FIND(result, name, arguments) \
    if (!(p_##name = (result (*) arguments)dlsym(ucp, #name))) return #name " is missing";
    NV_FUNCTIONS(NV_FIND)
    if (!(p_ucs_status_string = (const char *(*)(int))dlsym(ucs, "ucs_status_string")))
        return "ucs_status_string is missing";
    return NULL;
}

/* Write `count` pieces, one after the other, and request a flush. Returns NULL if all have arrived, a request to
 * poll, or a status in the pointer. A pending put needs no request of ours: the flush waits for it. */
static void *nv_put_all(void *ep, const char **pieces, const size_t *lengths, size_t count, uint64_t remote, void *key)
{
    nv_request_param none = {0};
    for (size_t at = 0; at < count; at++) {
        void *request = p_ucp_put_nbx(ep, pieces[at], lengths[at], remote, key, &none);
        if (nv_is_pointer(request))
            p_ucp_request_free(request);
        else if (request)
            return request;
        remote += lengths[at];
    }
    return p_ucp_ep_flush_nbx(ep, &none);
}

static void nv_on_error(void *arg, void *ep, int status) { (void)ep; *(int *)arg = status; }
#endif
