/* zmq_library.c - finds and opens libzmq: where the dynamic linker looks, else the one in the package pyzmq of the program's own
 * Python environment (PREFIX/bin/verlc of a wheel, .venv next to a tarball's program). */
#include "comm/comm_int.h"

#include "base/err.h"
#include "base/file.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

struct comm__zmq zmq;

#ifdef __SANITIZE_THREAD__
/* libzmq is not instrumented: what its threads exchange looks unsynchronised. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) { return "called_from_lib:libzmq\ncalled_from_lib:libsodium\n"; }
#endif

static void *open_python(const char *prefix) {
    char *pattern = xasprintf("%s/lib/python3*/site-packages/pyzmq.libs/libzmq-*.so.5*", prefix);
    void *handle = NULL;
    glob_t g;
    if (glob(pattern, 0, NULL, &g) == 0) {
        for (size_t i = 0; i < g.gl_pathc && !handle; i++) handle = dlopen(g.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
        globfree(&g);
    }
    free(pattern);
    return handle;
}

static void *open_library(void) {
    void *handle = dlopen("libzmq.so.5", RTLD_NOW | RTLD_LOCAL);
    char *dir = handle ? NULL : file_program_dir();
    if (!dir) return handle;
    char *venv = file_join(dir, ".venv");
    handle = open_python(venv);
    char *slash = strrchr(dir, '/');
    if (slash) *slash = '\0';
    if (!handle) handle = open_python(dir);
    free(venv);
    free(dir);
    return handle;
}

/* Strangers' connections have a descriptor each until their handshake fails; a run needs its own meanwhile. */
static void raise_open_files(void) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur == r.rlim_max) return;
    r.rlim_cur = r.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &r);
}

static int open_all(void) {
    void *handle = open_library();
    if (!handle)
        FAIL(ERR_INPUT,
             "several ranks need ZeroMQ, and libzmq.so.5 is not there (%s): 'apt-get install libzmq5', or 'pip install pyzmq' in "
             "verlc's own environment",
             dlerror());
#define X(f)                                     \
    *(void **)&zmq.f = dlsym(handle, "zmq_" #f); \
    if (!zmq.f) FAIL(ERR_INPUT, "libzmq.so.5 has no zmq_" #f ": install libzmq 4.2 or newer");
    COMM__ZMQ(X)
#undef X
    if (!zmq.has("curve"))
        FAIL(ERR_INPUT, "libzmq.so.5 was built without CURVE encryption; install one with it (Debian's libzmq5)");
    raise_open_files();
    return 0;
}

int comm__zmq_open(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool done;
    pthread_mutex_lock(&lock);
    const int rc = done ? 0 : open_all();
    done = rc == 0;
    pthread_mutex_unlock(&lock);
    TRY(rc);
    return 0;
}

int comm__zmq_fail(const char *what) { FAIL(ERR_IO, "%s: %s", what, zmq.strerror(errno)); }
