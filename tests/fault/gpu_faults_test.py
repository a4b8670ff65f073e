"""A GPU that is shared or full: another program holds its memory before the run, takes it between
the plan and the allocations, or trains beside it.  One line, exit status 4, and what was saved goes
on; two runs beside each other end in the bits of one alone.  Does nothing where there is no GPU."""

import ctypes
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Scratch, Tests, has_gpu, run, state  # noqa: E402

RESOURCES = 4
MIB = 1 << 20
KEYS = {"trainer.device": "cuda", "trainer.total_training_steps": 4}


class Hog:
    """Holds memory of GPU 0 through the driver, all but what is left."""

    def __init__(self):
        self.cuda, self.blocks = ctypes.CDLL("libcuda.so.1"), []
        device, context = ctypes.c_int(), ctypes.c_void_p()
        assert self.cuda.cuInit(0) == 0 and self.cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
        assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and self.cuda.cuCtxSetCurrent(context) == 0

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    def take_all_but(self, left):
        block = ctypes.c_uint64()
        if self.free() > left and self.cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(self.free() - left)) == 0:
            self.blocks.append(block)

    def give_back(self):
        for b in self.blocks:
            assert self.cuda.cuMemFree_v2(b) == 0
        self.blocks = []


def last_line(stderr):
    return next((line for line in reversed(stderr.splitlines()) if line.startswith("error: ")), stderr[-300:])


def held(s, test, hog, want):
    """Memory that others hold is seen at the start: what does not fit is refused with their share named."""
    run(*s.ppo("held", **{**KEYS, "trainer.total_training_steps": 2}))
    hog.take_all_but(900 * MIB)
    p = run(*s.ppo("held", **KEYS), check=False)
    print(f"        exit {p.returncode}: {last_line(p.stderr)}")
    test.refused("a GPU that is full: refused before the first step", p, RESOURCES, "other programs hold")
    hog.give_back()
    hog.take_all_but(100 * MIB)
    p = run(*s.ppo("held", **KEYS), check=False)
    print(f"        exit {p.returncode}: {last_line(p.stderr)}")
    test.refused("not even room for a context", p, RESOURCES, "cuda")
    hog.give_back()
    run(*s.ppo("held", **KEYS))
    test("with the memory back the run goes on to the same bits", state(s.dir / "held", 4) == want)


def taken(s, test, hog, want):
    """Memory that goes between the plan and its allocation."""
    run(*s.ppo("taken", **{**KEYS, "trainer.total_training_steps": 2}))
    p = subprocess.Popen([VERLC, *map(str, s.ppo("taken", **KEYS))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                         env=ENV)
    text = ""
    for line in p.stderr:
        text += line
        if line.lstrip().startswith("limit "):
            hog.take_all_but(0)
            while hog.free() > 32 * MIB and p.poll() is None:
                hog.take_all_but(16 * MIB)
    p.wait()
    print(f"        exit {p.returncode}: {last_line(text)}")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    test("memory taken after the plan: one line, exit 4", p.returncode == RESOURCES and len(errors) == 1 and
         ("out of memory" in errors[0] or "cannot allocate" in errors[0]), text[-600:])
    hog.give_back()
    run(*s.ppo("taken", **KEYS))
    test("it goes on from its checkpoint to the same bits", state(s.dir / "taken", 4) == want)


def beside(s, test, want):
    runs = [subprocess.Popen([VERLC, *map(str, s.ppo(f"beside{i}", **KEYS))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                             text=True, env=ENV) for i in range(2)]
    texts = [p.communicate(timeout=300)[1] for p in runs]
    test("two runs on one GPU both end", all(p.returncode == 0 for p in runs), texts[0][-300:] + texts[1][-300:])
    test("each in the bits of a run alone", all(state(s.dir / f"beside{i}", 4) == want for i in range(2)))
    bound = {**KEYS, "trainer.device_memory_limit": "20MiB"}
    test.refused("a limit of the run's own is kept to", run(*s.ppo("bound", **bound), check=False), RESOURCES, "the limit is")


def main():
    test = Tests()
    with Scratch() as s:
        if has_gpu(s.dir / "model"):
            run(*s.ppo("alone", **KEYS))
            want = state(s.dir / "alone", 4)
            beside(s, test, want)
            hog = Hog()
            held(s, test, hog, want)
            taken(s, test, hog, want)
        else:
            print("skip: no GPU that works")
            test("nothing to share without a GPU", not os.environ.get("VERLC_TEST_BACKENDS", "").startswith("cuda"))
    test.end()


main()
