"""nvpool's declarations of UCX's C interface match the UCX headers, field by field."""

import re
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import nvpool
from nvpool.rpc.transports import ucx

ABI = Path(nvpool.__file__).parent / "rpc/transports/_ucx_abi.h"
STRUCTS = {
    "nv_params": (
        "ucp_params_t",
        "field_mask features request_size request_init request_cleanup tag_sender_mask "
        "mt_workers_shared estimated_num_eps estimated_num_ppn name node_local_id",
    ),
    "nv_worker_params": ("ucp_worker_params_t", "field_mask thread_mode"),
    "nv_map_params": ("ucp_mem_map_params_t", "field_mask address length flags prot memory_type"),
    "nv_mem_attr": ("ucp_mem_attr_t", "field_mask address length"),
    "nv_ep_params": ("ucp_ep_params_t", "field_mask address err_mode err_handler user_data flags"),
    "nv_request_param": (
        "ucp_request_param_t",
        "op_attr_mask flags request cb datatype user_data reply_buffer memory_type recv_info memh",
    ),
}
NUMBERS = {
    "NV_PARAM_FEATURES": "UCP_PARAM_FIELD_FEATURES",
    "NV_PARAM_SHARED": "UCP_PARAM_FIELD_MT_WORKERS_SHARED",
    "NV_FEATURE_RMA": "UCP_FEATURE_RMA",
    "NV_FEATURE_WAKEUP": "UCP_FEATURE_WAKEUP",
    "NV_WORKER_THREAD_MODE": "UCP_WORKER_PARAM_FIELD_THREAD_MODE",
    "NV_MAP_LENGTH": "UCP_MEM_MAP_PARAM_FIELD_LENGTH",
    "NV_MAP_FLAGS": "UCP_MEM_MAP_PARAM_FIELD_FLAGS",
    "NV_MAP_ALLOCATE": "UCP_MEM_MAP_ALLOCATE",
    "NV_MEM_ADDRESS": "UCP_MEM_ATTR_FIELD_ADDRESS",
    "NV_EP_ADDRESS": "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS",
    "NV_EP_ERR_MODE": "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE",
    "NV_EP_ERR_HANDLER": "UCP_EP_PARAM_FIELD_ERR_HANDLER",
    "NV_ERR_NONE": "UCP_ERR_HANDLING_MODE_NONE",
    "NV_ERR_PEER": "UCP_ERR_HANDLING_MODE_PEER",
    "NV_OP_FLAGS": "UCP_OP_ATTR_FIELD_FLAGS",
    "NV_CLOSE_FORCE": "UCP_EP_CLOSE_FLAG_FORCE",
    "NV_OK": "UCS_OK",
    "NV_IN_PROGRESS": "UCS_INPROGRESS",
    "NV_BUSY": "UCS_ERR_BUSY",
    "NV_ERROR_LAST": "UCS_ERR_LAST",
}


@pytest.mark.skipif(
    find_spec("libucx") is None, reason="the wheel libucx is not installed (pip install 'nvpool[rdma]')"
)
def test_layouts_and_numbers_match_the_ucx_headers(tmp_path):
    text = ABI.read_text()
    declared = set(re.findall(r"\bNV_[A-Z_]+(?= =|,| \})", text))
    assert set(NUMBERS) == {name for name in declared if re.search(rf"\b{name} = ", text)}
    lines = ["#include <stddef.h>", "#include <ucp/api/ucp.h>", f'#include "{ABI}"']
    for ours, (theirs, fields) in STRUCTS.items():
        lines += [
            f'_Static_assert(offsetof({ours}, {field}) == offsetof({theirs}, {field}), "{ours}.{field}");'
            for field in fields.split()
        ]
        lines.append(f'_Static_assert(sizeof({ours}) >= sizeof({theirs}) || sizeof({ours}) >= 88, "{ours}");')
    lines += [
        f'_Static_assert((long long){ours} == (long long){theirs}, "{ours}");'
        for ours, theirs in NUMBERS.items()
    ]
    source = tmp_path / "compared.c"
    source.write_text(
        "\n".join(lines) + "\nint main(void) { return nv_load && nv_put_all && nv_on_error ? 0 : 1; }\n"
    )
    include = Path(find_spec("libucx").submodule_search_locations[0]) / "include"
    compiler = (sysconfig.get_config_var("CC") or "gcc").split()[0]
    built = subprocess.run(
        [compiler, "-Wno-unused", f"-I{include}", "-fsyntax-only", str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    source.write_text(
        source.read_text().replace("offsetof(nv_ep_params, flags)", "offsetof(nv_ep_params, user_data)")
    )
    assert subprocess.run(
        [compiler, f"-I{include}", "-fsyntax-only", str(source)], capture_output=True
    ).returncode


@pytest.mark.skipif(bool(ucx.missing()), reason=ucx.missing() or "never")
def test_library_is_found_with_its_version():
    place, _ = ucx.library()
    assert Path(place, "libucp.so.0").exists()
    assert tuple(map(int, ucx.version().split(".")[:2])) >= (1, 13)
