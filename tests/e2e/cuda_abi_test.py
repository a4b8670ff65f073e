"""The hash by which the program and libverlc_cuda.so notice that they come from different builds (cmake/cuda_abi.cmake) covers
every struct that they exchange, and a library with another hash is refused. Needs no GPU."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Tests

TOP = pathlib.Path(os.environ["SOURCE_DIR"])
STRUCTS = {"device/ops.h": "dev_sizes dev_memory dev_ops quant8_args dequant_args add_block_args rmsnorm_bwd_args decode_row",
           "device/device.h": "dev", "device/tensor.h": "tensor weight kv", "device/collective/peers.h": "dev_peer_ops",
           "device/collective/transport.h": "dev_nccl_ops dev_transport_ops", "device/cuda/scratch_sizes.h": "cuda_shape"}


def abi(src):
    p = subprocess.run(["cmake", f"-DSRC={src}", "-P", TOP / "cmake/cuda_abi.cmake"], capture_output=True, text=True, check=True)
    return p.stderr.strip()


test = Tests()
scratch = tempfile.TemporaryDirectory(prefix="verlc-test-")
top = pathlib.Path(scratch.name)
src = top / "src"
shutil.copytree(TOP / "src/base", src / "base")
shutil.copytree(TOP / "src/device", src / "device")
same = abi(src)
test("a hash, and that of the tree", re.fullmatch("[0-9a-f]{64}", same) and same == abi(TOP / "src"), same)
for header, names in STRUCTS.items():
    for name in names.split():
        text = (src / header).read_text()
        grown = re.sub(rf"^struct {name} {{", rf"\g<0> int grown;", text, count=1, flags=re.M)
        (src / header).write_text(grown)
        test(f"a member more in struct {name}", grown != text and abi(src) != same, header)
        (src / header).write_text(text)
(src / "device/cuda/vec.cuh").write_text((src / "device/cuda/vec.cuh").read_text() + "/* . */\n")
test("what is the library's own does not count", abi(src) == same, "vec.cuh")
(top / "other.c").write_text(f'const char verlc_cuda_abi[] = "{"0" * 64}";\n')
subprocess.run(["cc", "-shared", "-fPIC", "-o", top / "other.so", top / "other.c"], check=True)
p = subprocess.run([VERLC, "bench", "gemm", "--device", "cuda"], capture_output=True, text=True,
                   env={**ENV, "VERLC_CUDA_LIB": str(top / "other.so")})
test("a library of other headers is refused", p.returncode == 4 and "belongs to another build" in p.stderr, p.stderr)
scratch.cleanup()
test.end()
