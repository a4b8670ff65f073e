"""Programs that try to get out of the sandbox, to take the machine down, or to stay: each is blocked, and no process, file or
mount is left.  Where this machine allows no namespaces: that is refused with the reason, and nothing runs.

An attack prints ESCAPED and what it reached; one that is blocked prints BLOCKED."""

import concurrent.futures
import fcntl
import glob
import json
import os
import pathlib
import platform
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import ENV, VERLC, Tests, patience  # noqa: E402

sys.path.insert(0, str(pathlib.Path(os.environ.get("SOURCE_DIR", ".")).resolve() / "python"))
os.environ["VERLC"] = VERLC
from verlc_helpers.sandbox import SandboxError, python_dirs, python_request, run, run_python  # noqa: E402

MARK = f"87000.{os.getpid()}"  # the argument of every sleep that an attack starts
SECRET = f"secret-{os.getpid()}"
GIVEN = sorted({pathlib.Path(d).relative_to("/tmp").parts[0] for d in python_dirs() if d.startswith("/tmp/")})  # of a clone there

START = '''
import ctypes, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def tries(**attempts):
    """Each may raise, or return what it reached."""
    for name, attempt in attempts.items():
        try:
            reached = attempt()
        except BaseException as error:
            print("BLOCKED", name, repr(error)[:80])
        else:
            print("BLOCKED" if reached in (None, False, "", b"", []) else "ESCAPED", name, repr(reached)[:80], flush=True)

def syscall(number, *arguments):
    """Whether the kernel knows it here, from whatever it says but ENOSYS."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return result != -1 or ctypes.get_errno() != 38
'''

# What a program has no use for; numbers of x86-64.
CALLS = dict(word.split("=") for word in """
ptrace=101 process_vm_readv=310 process_vm_writev=311 mount=165 umount2=166 pivot_root=155 chroot=161 unshare=272 setns=308
add_key=248 request_key=249 keyctl=250 bpf=321 perf_event_open=298 userfaultfd=323 io_uring_setup=425 io_uring_enter=426
kexec_load=246 kexec_file_load=320 init_module=175 finit_module=313 delete_module=176 name_to_handle_at=303
open_by_handle_at=304 memfd_create=319 memfd_secret=447 shmget=29 semget=64 msgget=68 mq_open=240 mlock=149 mlockall=151
sched_setaffinity=203 sched_setscheduler=144 setpriority=141 ioprio_set=251 personality=135 swapon=167 reboot=169 acct=163
quotactl=179 pidfd_open=434 pidfd_getfd=438 fsopen=430 open_tree=428 move_mount=429 mount_setattr=442
landlock_create_ruleset=444 seccomp=317 vmsplice=278 splice=275 tee=276 clone3=435 iopl=172 ioperm=173 modify_ldt=154
syslog=103 fanotify_init=300 inotify_init=253 sethostname=170 setdomainname=171 settimeofday=164 clock_settime=227
adjtimex=159 mknod=133 mknodat=259 connect=42 bind=49 listen=50 accept=43 sendmsg=46 recvmsg=47 chown=92 setxattr=188
process_madvise=440 kcmp=312 move_pages=279 mbind=237 lookup_dcookie=212 nfsservctl=180""".split())
NAMESPACES = dict(user=0x10000000, pid=0x20000000, net=0x40000000, mount=0x00020000, uts=0x04000000, ipc=0x08000000)


def attacks(scratch):
    """name -> (code, limits, the ends that are right)."""
    calls = f"tries(**{{name: (lambda n=n: syscall(int(n), 0, 0, 0, 0, 0)) for name, n in {CALLS!r}.items()}})"
    clone = f"tries(**{{name: (lambda f=f: syscall(56, f | 17, 0, 0, 0, 0)) for name, f in {NAMESPACES!r}.items()}})"
    x86 = platform.machine() == "x86_64"
    a = {
        "sockets": ('tries(**{n: (lambda f=f, t=t: socket.socket(f, t)) for n, f, t in [("inet", 2, 1), ("inet6", 10, 1), '
                    '("udp", 2, 2), ("unix", 1, 1), ("netlink", 16, 3), ("packet", 17, 3), ("vsock", 40, 1), ("alg", 38, 5), '
                    '("raw", 2, 3), ("bluetooth", 31, 5)]}, pair_inet=lambda: socket.socketpair(2, 1))'),
        "files of the machine": (f'''
def read(path): return open(path, errors="replace").read(100)
paths = ["/etc/shadow", "/etc/passwd", "/root/.ssh/id_rsa", "/root/.bashrc", "/home", {str(scratch / "secret")!r},
         {str(scratch)!r}, {os.path.expanduser("~/.ssh")!r}, "/proc/1/environ", "/proc/self/environ", "/proc/1/root/etc/passwd",
         "/proc/self/mem",
         "/proc/sys/kernel/core_pattern", "/sys", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/tty", "/dev/ptmx",
         "/var/log", "/run", "/boot", "/proc"]
tries(**{{p: (lambda p=p: os.listdir(p) if os.path.isdir(p) else read(p)) for p in paths if p != sys.prefix}},
      home=lambda: {SECRET!r} in str(os.listdir(os.path.expanduser("~"))), parent=lambda: [p for p in os.listdir("/")
      if p not in ("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "tmp", "usr")
      and not sys.prefix.startswith("/" + p + "/")
      and not sys.base_prefix.startswith("/" + p + "/")])'''),
        "environment": 'tries(env=lambda: [k for k in os.environ if "SECRET" in k or "TOKEN" in k], '
        'extra=lambda: sorted(set(os.environ) - set("PATH HOME TMPDIR LANG LC_CTYPE OMP_NUM_THREADS '
        'OPENBLAS_NUM_THREADS MALLOC_ARENA_MAX PWD".split())))',
        "descriptors": '''
def opened():
    found = []
    for fd in range(3, 1 << 16):
        try: os.fstat(fd); found.append(fd)
        except OSError: pass
    return found
tries(inherited=opened, write_stdin=lambda: os.write(0, b"x"), grow_stdin=lambda: os.ftruncate(0, 1 << 20) or True,
      stdin_link=lambda: open("/dev/fd/0").read(1), reopen=lambda: open("/proc/self/fd/0", "w"))''',
        "writing elsewhere": '''
def write(path): open(path, "w").write("x"); return path
tries(**{p: (lambda p=p: write(p)) for p in ["/x", "/usr/x", "/usr/bin/x", "/etc/x", "/dev/x", os.__file__, sys.executable,
      os.path.dirname(os.__file__) + "/x.py", "/etc/ld.so.cache", "/etc/ld.so.preload", "/dev/shm/../x", "/dev/null/x"]},
      rename=lambda: os.rename("/usr/bin", "/usr/bon") or True, hard_link=lambda: os.link("/usr/bin/env", "/tmp/env") or True,
      remove=lambda: os.remove(os.__file__) or True, chmod=lambda: os.chmod("/usr/bin/env", 0o777) or True,
      root=lambda: os.mkdir("/new") or True, move_tmp=lambda: os.rename("/tmp", "/tmp2") or True)''',
        "links out": f'''
def through(target):
    os.symlink(target, "/tmp/link")
    try: return open("/tmp/link").read(10)
    finally: os.unlink("/tmp/link")
tries(shadow=lambda: through("/etc/shadow"), up=lambda: through("../../../../etc/shadow"),
      run=lambda: through({str(scratch / "secret")!r}),
      proc=lambda: through("/proc/1/root/etc/hostname"), old=lambda: os.listdir("/oldroot"), new=lambda: os.listdir("/newroot"))''',
        "processes of others": '''
import re
def nobody(*pids):
    for p in pids:
        try: os.kill(p, 0); return p
        except ProcessLookupError: pass
tries(host=lambda: nobody(*range(300, 400)), up=lambda: os.getppid() > 5,
      trace=lambda: libc.ptrace(16, 1, 0, 0) == 0, me=lambda: libc.ptrace(0, 0, 0, 0) == 0)
os.kill(1, 9); os.kill(1, 19)
for sig in range(1, 65):
    if sig not in (9, 19, 20, 21, 22, 32, 33):
        try: signal.signal(sig, signal.SIG_IGN)
        except (OSError, ValueError): pass
os.killpg(0, 15); os.kill(-1, 15)
try: os.kill(-1, 9)
except OSError: pass
print("BLOCKED, and still here")''',
        "privileges": '''
tries(nice=lambda: os.nice(-5), affinity=lambda: os.sched_setaffinity(0, [0]) or True, uid=lambda: os.setuid(0) or True,
      unshare=lambda: libc.unshare(0x10000000) == 0,
      mount=lambda: subprocess.run(["mount", "-t", "tmpfs", "x", "/tmp"]).returncode == 0,
      su=lambda: subprocess.run(["su", "-c", "id"], stdin=-3).returncode == 0, chroot=lambda: os.chroot("/tmp") or True,
      block=lambda: os.mknod("/tmp/b", 0o60600, os.makedev(254, 0)) or True, host=lambda: socket.sethostname("x") or True)
import resource
for what, at in ((resource.RLIMIT_AS, "memory"), (resource.RLIMIT_CPU, "cpu"), (resource.RLIMIT_NOFILE, "files"),
                 (resource.RLIMIT_FSIZE, "size"), (resource.RLIMIT_CORE, "core")):
    tries(**{at: lambda: resource.setrlimit(what, (resource.RLIM_INFINITY,) * 2) or True})''',
        "setuid in /tmp": '''
import shutil
shutil.copy("/usr/bin/id", "/tmp/id"); os.chmod("/tmp/id", 0o6755)
tries(root=lambda: subprocess.run(["/tmp/id", "-u"], stdout=-1).stdout.strip() not in (str(os.getuid()).encode(), b""))''',
        "terminal": '''
import fcntl
tries(**{f"{name}{fd}": (lambda fd=fd, r=r: fcntl.ioctl(fd, r, b"x") or True) for fd in (0, 1, 2)
         for name, r in (("sti", 0x5412), ("linux", 0x541c), ("ctty", 0x540e))},
      tty=lambda: open("/dev/tty"), high=lambda: libc.ioctl(0, ctypes.c_ulong(0x100005412), b"x") == 0)''',
        "survivors": f'''
for i in range(3):
    if os.fork() == 0:
        os.setsid()
        for sig in range(1, 32):
            if sig not in (9, 17, 19): signal.signal(sig, signal.SIG_IGN)
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", {MARK!r}])
        os._exit(0)
subprocess.Popen(["setsid", "sleep", {MARK!r}])
time.sleep(0.2)
print("BLOCKED if they end")''',
        "removes itself": 'import shutil; os.remove("main.py"); shutil.rmtree("/tmp", ignore_errors=True); '
        f'tries(left=lambda: sorted(set(os.listdir("/tmp")) - set({GIVEN})))',
        "fork bomb": ("print('BLOCKED', flush=True)\nwhile True:\n    try: os.fork()\n    except OSError: pass", dict(wall_s=3),
                      {"process_limit", "wall_limit", "cpu_limit"}),
        "fork bomb, sessions": ("print('BLOCKED', flush=True)\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n"
                                "    except OSError: pass", dict(wall_s=1), {"process_limit", "wall_limit", "cpu_limit"}),
        "thread bomb": ('''
import threading
print("BLOCKED", flush=True)
threading.stack_size(64 << 10)
while True:
    try: threading.Thread(target=time.sleep, args=(100,)).start()
    except RuntimeError: pass''', dict(wall_s=1), {"process_limit", "wall_limit", "cpu_limit"}),
        "memory bomb": ("tries(memory=lambda: len(bytearray(2 << 30)))", dict(memory_mb=256), {"exited"}),
        "memory bomb, many": ('''
print("BLOCKED", flush=True)
for i in range(20):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        for k in range(0, len(x), 4096): x[k] = 1
        time.sleep(9)
time.sleep(9)''', dict(memory_mb=256, wall_s=5), {"memory_limit"}),
        "memory bomb, shared": ('''
import mmap
print("BLOCKED", flush=True)
for i in range(20):
    if os.fork() == 0:
        x = mmap.mmap(-1, 60 << 20)
        for k in range(0, len(x), 4096): x[k] = 1
        time.sleep(9)
time.sleep(9)''', dict(memory_mb=256, wall_s=5), {"memory_limit"}),
        "disk fill": ('''
n = 0
try:
    for i in range(10):
        with open(f"/tmp/{i}", "wb") as f:
            for k in range(256): n += f.write(b"x" * (1 << 20))
except OSError as error: print("BLOCKED" if n <= 32 << 20 else "ESCAPED", n, error)
tries(sparse=lambda: os.truncate("/tmp/0", 1 << 40) or True, shm=lambda: open("/dev/shm/x", "wb").write(b"x" * (64 << 20)))''',
                      dict(disk_mb=32), {"exited", "signaled"}),
        "file bomb": ('print("BLOCKED", flush=True)\nfor i in range(1 << 30): os.mkdir(f"/tmp/{i}")', dict(wall_s=5),
                      {"disk_limit"}),
        "descriptor bomb": ('fds = []\ntry:\n    while True: fds.append(os.pipe())\nexcept OSError: print("BLOCKED", len(fds))',
                            {}, {"exited"}),
        "output without end": ('print("BLOCKED")\nwhile True: print("x" * 1000)', {}, {"output_limit"}),
        "errors without end": ('print("BLOCKED", flush=True)\nwhile True: print("x" * 1000, file=sys.stderr)', {},
                               {"output_limit"}),
        "sleep for ever": ('print("BLOCKED", flush=True)\ntime.sleep(1e6)', dict(wall_s=1), {"wall_limit"}),
        "closed output, hanging": ('print("BLOCKED", flush=True)\nfor i in range(3): os.close(i)\nwhile True: time.sleep(1e6)',
                                   dict(wall_s=1), {"wall_limit"}),
        "stops itself": ('print("BLOCKED", flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)', dict(wall_s=1), {"wall_limit"}),
        "busy for ever": ('print("BLOCKED", flush=True)\nwhile True: pass', dict(cpu_s=1, wall_s=9), {"cpu_limit", "wall_limit"}),
        "ignores SIGXCPU": ('print("BLOCKED", flush=True)\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass',
                            dict(cpu_s=1, wall_s=9), {"signaled", "wall_limit"}),
        "core dump": ('print("BLOCKED", flush=True)\nos.abort()', {}, {"signaled"}),
    }
    if x86:
        a["system calls"] = calls
        a["namespaces"] = clone
        a["32-bit system calls"] = ('''
import mmap
print("BLOCKED", flush=True)
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())''', {}, {"signaled"})
    return {name: (v, {}, {"exited"}) if isinstance(v, str) else v for name, v in a.items()}


def strays():
    found = []
    for d in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (d / "cmdline").read_text().split("\0")
            if (MARK in words or "--json-status-fd" in words and
                    str(os.getpid()) in lineage(int(d.name))) and "State:\tZ" not in (d / "status").read_text():
                found.append((int(d.name), words[:3]))
        except OSError:
            pass  # it has just ended
    return found


def lineage(pid):
    """The process's ancestors."""
    found = []
    while pid > 1:
        found.append(str(pid))
        try:
            pid = int((pathlib.Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def no_strays(seconds=20):
    end = time.monotonic() + seconds
    while strays() and time.monotonic() < end:
        time.sleep(0.05)
    return strays()


SYSTEM_PYTHON = "/usr/bin/python3"
CALLERS = {  # who calls verlc -> what makes the test, which is root, that caller
    "user": ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups", "--inh-caps=-all"],
    "root of a container": ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"],
}


def attack_all(test, scratch, who="", caller=()):
    """As the test's own user with its Python; or as another with the system's, for which the program is a script."""
    program = scratch / f"verlc-{who}"
    program.write_text(f'#!/bin/sh\nexec {" ".join(caller)} {VERLC} "$@"\n')
    program.chmod(0o755)

    def one(item):
        name, (code, limits, ends) = item
        if caller:
            return name, limits, ends, run([SYSTEM_PYTHON, "-I", "main.py"], "input", {"main.py": START + code}, **limits)
        return name, limits, ends, run_python(START + code, stdin="input", **limits)

    def judged(limits, ends, r):
        """Whether it escaped; whether it was blocked as it should be."""
        escaped = [line for line in r["stdout"].splitlines() if line.startswith("ESCAPED")]
        late = r["wall_s"] > limits.get("wall_s", 10) + patience(5)
        over = r["peak_bytes"] > (limits.get("memory_mb", 1024) + 512 << 20)
        return escaped, not escaped and "BLOCKED" in r["stdout"] and r["end"] in ends and not late and not over

    os.environ["VERLC"] = str(program) if caller else VERLC
    items = attacks(scratch)
    def among_others(item):
        try:
            return one(item)
        except SandboxError:  # a bomb beside it had taken the user's last process: no sandbox could be made
            return item[0], item[1][1], item[1][2], None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        done = list(pool.map(among_others, items.items()))
    for name, limits, ends, r in done:
        escaped, blocked = judged(limits, ends, r) if r else ([], False)
        if not escaped and not blocked:  # among bombs a program may not come to its attack in time: once more, alone
            more = {**limits, "wall_s": 5 * limits.get("wall_s", 10)}
            _, limits, ends, r = one((name, (items[name][0], more, ends)))
            escaped, blocked = judged(limits, ends, r)
        out = r["stdout"]
        test(f"attack{who and f' on a {who}'}: {name}: {out.count('BLOCKED')} blocked, {r['end']}", blocked,
             f"{escaped} {r['end']} {r['status']} {r['wall_s']:.1f} s {r['peak_bytes']} {out[-300:]!r} {r['stderr'][-300:]!r}")
    os.environ["VERLC"] = VERLC


def other_callers(test, scratch):
    """The same of who calls as somebody else, where this test may become that."""
    scratch.chmod(0o755)
    for who, caller in CALLERS.items():
        check = subprocess.run([*caller, VERLC, "sandbox", "--check"], capture_output=True, check=False, text=True)
        if os.geteuid() == 0 and os.path.exists(SYSTEM_PYTHON) and check.returncode == 0:
            attack_all(test, scratch, who, caller)
        else:
            print(f"skipped as {who}: {check.stderr.strip()}")


def inherited(test, scratch):
    """A descriptor that the caller holds open for its children does not reach the program."""
    with open(scratch / "secret", encoding="utf-8") as secret:
        fds = [fcntl.fcntl(secret, fcntl.F_DUPFD, at) for at in (3, 9, 40)]
        code = ("import os\nfor fd in range(3, 99):\n    try: print('ESCAPED', fd, os.read(fd, 50))\n    except OSError: pass\n"
                "print('BLOCKED')")
        p = subprocess.run([VERLC, "sandbox", "--request"],
                           input=json.dumps(python_request(code, "", None)),
                           text=True,
                           capture_output=True,
                           pass_fds=fds,
                           check=False,
                           timeout=60)
        for fd in fds:
            os.close(fd)
    test("inherited descriptors do not reach the program", json.loads(p.stdout)["stdout"] == "BLOCKED\n", p.stdout + p.stderr)


def apart(test):
    """Two at a time know nothing of each other; one that kills what it can harms no other."""
    write = "open('/tmp/mine', 'w').write('x')\nimport time; time.sleep(0.6)\nprint('done')"
    look = "import os, time; time.sleep(0.3)\ntry: os.kill(-1, 9)\nexcept OSError: pass\nprint(sorted(os.listdir('/tmp')))"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        a, b = pool.submit(run_python, write), pool.submit(run_python, look)
        test("two sandboxes are apart", a.result()["stdout"] == "done\n" and
             b.result()["stdout"] == f"{sorted(['main.py', *GIVEN])}\n", f"{a.result()} {b.result()}")


def killed(test):
    """kill -9 of verlc itself."""
    request = json.dumps(
        python_request(
            f"import os\nfor i in range(3):\n    if os.fork() == 0:\n        os.setsid(); os.execvp('sleep', ['sleep', {MARK!r}])\n"
            "import time; time.sleep(1000)", "", None))
    p = subprocess.Popen([VERLC, "sandbox", "--wall=100", "--request"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    p.stdin.write(request.encode())
    p.stdin.close()
    end = time.monotonic() + 120
    while len(strays()) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    before = len(strays())
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    left = no_strays()
    test("kill -9 of verlc ends the program and all that it started", before >= 4 and not left, f"{before} before, {left} left")


def on_terminal(test):
    """At a terminal: nothing is typed into it, and its size is all that may be asked."""
    pid, master = pty.fork()
    if pid == 0:
        code = (
            "import fcntl, os\nfor fd in (0, 1, 2):\n"
            "    try: fcntl.ioctl(fd, 0x5412, b'x'); print('ESCAPED')\n    except OSError: pass\n"
            "try: open('/dev/tty'); print('ESCAPED')\nexcept OSError: print('BLOCKED')")
        request = json.dumps(python_request(code, "", None))
        done = subprocess.run([VERLC, "sandbox", "--request"], input=request.encode(), check=False)
        os._exit(done.returncode)
    out = b""
    try:
        while piece := os.read(master, 4096):
            out += piece
    except OSError:  # its end
        pass
    os.waitpid(pid, 0)
    os.close(master)
    test("at a terminal: no control over it", b"BLOCKED" in out and b"ESCAPED" not in out, out.decode("utf-8", "replace"))


def limits_of_use(test):
    """What honest programs do works."""
    r = run_python("import sys; print(sys.stdin.read().upper(), end=''); sys.exit(3)", stdin="hé\0llo\n")
    test("input, output, exit code", (r["end"], r["status"], r["stdout"]) == ("exited", 3, "HÉ\0LLO\n"), r)
    r = run_python(
        "import sys; sys.stdout.buffer.write(b'a\\xffb\\xc3'); open('x','w').write(open('data').read()); print(open('x').read())",
        files={"data": "text"})
    test("bytes that are no UTF-8, files", r["stdout"] == "a\ufffdb\ufffdtext\n", r)
    code = ("import asyncio, concurrent.futures, multiprocessing, subprocess, tempfile, threading\n"
            "asyncio.run(asyncio.sleep(0))\nprint(multiprocessing.get_context('fork').Pool(2).map(abs, [-1, -2]))\n"
            "print(list(concurrent.futures.ThreadPoolExecutor(4).map(abs, range(-3, 0))))\n"
            "print(subprocess.run(['sh', '-c', 'echo $((6*7)) | cat'], capture_output=True, text=True).stdout)\n"
            "print(tempfile.TemporaryFile().write(b'x'), threading.active_count())")
    r = run_python(code)
    test("threads, processes, asyncio, pipes, temporary files", r["status"] == 0 and "[1, 2]\n[3, 2, 1]\n42\n" in r["stdout"], r)
    if shutil.which("cc") and os.path.realpath(shutil.which("cc")).startswith("/usr/"):
        r = run(["sh", "-c", "cc -O1 -o a a.c && ./a"],
                files={"a.c": '#include <stdio.h>\nint main() { return !printf("C\\n"); }\n'})
        test("a C program is compiled and run", r["stdout"] == "C\n", r)
    for limits, words in ((dict(wall_s=0), "wall"), (dict(memory_mb=1), "memory-mb"), (dict(processes=0), "processes")):
        try:
            run_python("print(1)", **limits)
            test(f"refused: {limits}", False)
        except SandboxError as error:
            test(f"refused: {limits}", words in str(error), str(error))


def command(*args, **kw):
    return subprocess.run([VERLC, "sandbox", *args], capture_output=True, text=True, check=False, timeout=60, env=ENV, **kw)


def refusals(test, scratch):
    """Without namespaces nothing runs, and the message says why."""
    marker = scratch / "ran"
    holder = subprocess.Popen(["unshare", "-U", "sleep", "60"])  # a user namespace in which there are to be no further ones
    inside = ["nsenter", "-U", "-t", str(holder.pid), "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
    try:
        time.sleep(0.3)
        for ids in ("uid_map", "gid_map"):
            pathlib.Path(f"/proc/{holder.pid}/{ids}").write_text("0 0 65536", encoding="ascii")
    except OSError as error:
        print(error)
    kinds = {
        "no namespaces": ([*inside, *CALLERS["user"]], "max_user_namespaces"),
        "root of a namespace without users": (["unshare", "-Ur"], "no other user")
    }
    for kind, (caller, words) in kinds.items():
        if subprocess.run([*caller, "true"], capture_output=True, check=False).returncode != 0:
            print("skipped:", kind)
            continue
        for args in (["--check"], ["--", "touch", str(marker)]):
            p = subprocess.run([*caller, VERLC, "sandbox", *args],
                               capture_output=True,
                               text=True,
                               check=False,
                               timeout=60,
                               stdin=subprocess.DEVNULL)
            test.refused(f"{kind}: sandbox {args[0]} is refused", p, 3, words, "othing is run")
    holder.kill()
    holder.wait()
    p = command("--read=/", "--", "true", stdin=subprocess.DEVNULL)
    test.refused("the whole machine cannot be read", p, 2, "below /")
    test.refused("no program", command(stdin=subprocess.DEVNULL), 2, "--request")
    test.refused("a request that is no JSON", command("--request", input="{"), 3, "request")
    test.refused("a file outside the directory", command("--request", input='{"argv": ["true"], "files": {"../x": ""}}'), 2,
                 "directory")
    test("nothing has run", not marker.exists())


def forbidden(test):
    """On a machine that allows no sandbox."""
    p = command("--check")
    test("refused with the reason", p.returncode == 3 and "sandbox" in p.stderr and "nothing is run" in p.stderr.lower(), p.stderr)
    try:
        run_python("print('ran')")
        test("nothing runs", False)
    except SandboxError as error:
        test("nothing runs", bool(str(error)), str(error))
    test.end()


def main():
    test = Tests()
    os.environ["SANDBOX_SECRET_TOKEN"] = SECRET
    if command("--check").returncode != 0:
        forbidden(test)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="verlc-test-"))
    (scratch / "secret").write_text(SECRET, encoding="utf-8")
    mounts, temps = pathlib.Path("/proc/self/mounts").read_text(), set(glob.glob("/tmp/*") + glob.glob("/dev/shm/*"))
    limits_of_use(test)
    attack_all(test, scratch)
    other_callers(test, scratch)
    inherited(test, scratch)
    apart(test)
    on_terminal(test)
    killed(test)
    refusals(test, scratch)
    test("no process is left", not no_strays(), str(strays()))
    test("no mount is left", pathlib.Path("/proc/self/mounts").read_text() == mounts)
    new = {p for p in set(glob.glob("/tmp/*") + glob.glob("/dev/shm/*")) - temps if SECRET in p or "bubble" in p or "/core" in p}
    test("no file is left", not new and not glob.glob("core*"), str(new))
    shutil.rmtree(scratch)
    test.end()


if __name__ == "__main__":
    main()
