/* test_ranks_launcher.c - rank, size, host and job from the environments of launchers, taken from real starts; what is set and
 * makes no sense is refused, and the message says which variable it is. */
#include "base/err.h"
#include "ranks/launcher.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define ENV(...) ((char *const[]){"PATH=/bin", "HOME=/root", __VA_ARGS__, NULL})

static void expect(char *const *env, const char *by, int rank, int size, int local_rank, int local_size, int node,
                   const char *address, const char *job) {
    struct launch l;
    if (launch_read(&l, env) < 0) fail_msg("%s", err_msg());
    if (by) assert_string_equal(l.by, by);
    else assert_null(l.by);
    assert_int_equal(l.rank, rank);
    assert_int_equal(l.size, size);
    assert_int_equal(l.local_rank, local_rank);
    assert_int_equal(l.local_size, local_size);
    assert_int_equal(l.node, node);
    assert_string_equal(l.address, address);
    assert_string_equal(l.job, job);
}

static void expect_refused(char *const *env, const char *what) {
    struct launch l;
    assert_int_equal(launch_read(&l, env), ERR_INVAL);
    if (!strstr(err_msg(), what)) fail_msg("not '%s': %s", what, err_msg());
}

#define SBATCH                                                                                                                 \
    "SLURM_JOB_ID=4711", "SLURM_NTASKS=8", "SLURM_TASKS_PER_NODE=4(x2)", "SLURM_NNODES=2", "SLURM_NODEID=0", "SLURM_PROCID=0", \
        "SLURM_LOCALID=0"

static void by_hand(void **state) {
    (void)state;
    expect(ENV("TERM=xterm"), NULL, 0, 1, 0, 1, 0, "", "");
    expect(ENV(SBATCH), NULL, 0, 1, 0, 1, 0, "", "");                             /* the shell of sbatch is no rank */
    expect(ENV(SBATCH, "SLURM_STEP_ID=4294967290"), NULL, 0, 1, 0, 1, 0, "", ""); /* nor is that of salloc */
    expect(ENV("RANK=admiral"), NULL, 0, 1, 0, 1, 0, "", "");                     /* of somebody's shell */
    expect(ENV("MASTER_ADDR=10.0.0.1"), NULL, 0, 1, 0, 1, 0, "", "");
}

static void srun(void **state) {
    (void)state;
    expect(ENV("SLURM_JOB_ID=4711", "SLURM_STEP_ID=0", "SLURM_PROCID=5", "SLURM_NTASKS=8", "SLURM_STEP_NUM_TASKS=8",
               "SLURM_LOCALID=1", "SLURM_NODEID=1", "SLURM_STEP_TASKS_PER_NODE=4(x2)", "PMIX_RANK=5"),
           "srun", 5, 8, 1, 4, 1, "", "4711/0");
    expect(ENV("SLURM_JOB_ID=9", "SLURM_STEP_ID=3", "SLURM_PROCID=6", "SLURM_NTASKS=7", "SLURM_LOCALID=0", "SLURM_NODEID=2",
               "SLURM_TASKS_PER_NODE=3(x2),1"),
           "srun", 6, 7, 0, 1, 2, "", "9/3");
    expect_refused(ENV("SLURM_STEP_ID=0", "SLURM_PROCID=8", "SLURM_NTASKS=8", "SLURM_LOCALID=0"),
                   "SLURM_PROCID=8 is not below SLURM_NTASKS=8");
    expect_refused(ENV("SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_LOCALID=0"), "SLURM_NTASKS is not");
    expect_refused(ENV("SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_NTASKS=2"), "SLURM_LOCALID is not");
    expect_refused(ENV("SLURM_STEP_ID=0", "SLURM_PROCID=1x", "SLURM_NTASKS=2"), "SLURM_PROCID='1x' is not a whole number");
    for (int i = 0; i < 5; i++) {
        static char *const lists[] = {"SLURM_TASKS_PER_NODE=4(x", "SLURM_TASKS_PER_NODE=,", "SLURM_TASKS_PER_NODE=4",
                                      "SLURM_TASKS_PER_NODE=0(x9)", "SLURM_TASKS_PER_NODE=4;4"};
        expect_refused(ENV("SLURM_STEP_ID=0", "SLURM_PROCID=5", "SLURM_NTASKS=8", "SLURM_LOCALID=1", "SLURM_NODEID=1", lists[i]),
                       "SLURM_TASKS_PER_NODE");
    }
}

static void mpirun(void **state) {
    (void)state;
    /* inside a Slurm job the variables of srun are those of the node's daemon */
    expect(ENV("SLURM_JOB_ID=4711", "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_NTASKS=2", "SLURM_LOCALID=0",
               "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_SIZE=2",
               "PMIX_RANK=3", "PMIX_NAMESPACE=prterun-a-77@1"),
           "mpirun (Open MPI)", 3, 4, 1, 2, -1, "", "prterun-a-77@1");
    expect(ENV("PMI_RANK=2", "PMI_SIZE=4", "MPI_LOCALRANKID=0", "MPI_LOCALNRANKS=2"), "mpirun (PMI)", 2, 4, 0, 2, -1, "", "");
    expect(ENV("PMI_RANK=2", "PMI_SIZE=4", "PALS_LOCAL_RANKID=2", "PALS_APID=ab-1"), "mpirun (PMI)", 2, 4, 2, 0, -1, "", "ab-1");
    expect_refused(ENV("OMPI_COMM_WORLD_RANK=3"), "OMPI_COMM_WORLD_SIZE is not");
    expect_refused(ENV("OMPI_COMM_WORLD_SIZE=3"), "OMPI_COMM_WORLD_RANK is not");
    expect_refused(ENV("OMPI_COMM_WORLD_RANK=-1", "OMPI_COMM_WORLD_SIZE=4"), "OMPI_COMM_WORLD_RANK='-1'");
    expect_refused(ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4"), "OMPI_COMM_WORLD_LOCAL_RANK");
    expect_refused(
        ENV("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=2", "OMPI_COMM_WORLD_LOCAL_SIZE=2"),
        "OMPI_COMM_WORLD_LOCAL_RANK=2 is not below OMPI_COMM_WORLD_LOCAL_SIZE=2");
    expect_refused(ENV("PMI_RANK=2"), "PMI_SIZE is not");
    expect_refused(ENV("PMI_RANK=2", "PMI_SIZE=99999999999999999999"), "PMI_SIZE='9999");
    expect_refused(ENV("PMIX_RANK=2"), "PMIX_RANK is set, and nothing says how many ranks");
}

static void torchrun(void **state) {
    (void)state;
    expect(ENV("RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4", "GROUP_RANK=1", "MASTER_ADDR=node-a",
               "MASTER_PORT=29400", "TORCHELASTIC_RUN_ID=none", "TORCHELASTIC_RESTART_COUNT=0"),
           "torchrun", 5, 8, 1, 4, 1, "node-a", "none/0/node-a/29400");
    expect(ENV("RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=10.0.0.1"), "torchrun", 1, 2, 0, 0, -1, "10.0.0.1", "10.0.0.1"); /* a pod */
    expect_refused(ENV("RANK=1", "LOCAL_RANK=1", "MASTER_ADDR=a"), "WORLD_SIZE is not");
    expect_refused(ENV("WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=a"), "RANK is not");
    expect_refused(ENV("RANK=1", "WORLD_SIZE=2"), "MASTER_ADDR is not");
    expect_refused(ENV("RANK=1", "WORLD_SIZE=two", "MASTER_ADDR=a"), "WORLD_SIZE='two'");
    expect_refused(ENV("RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=-1", "MASTER_ADDR=a"), "LOCAL_RANK='-1'");
    expect_refused(ENV("RANK=1", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=3", "MASTER_ADDR=a"), "LOCAL_WORLD_SIZE='3'");
}

static void own_workers(void **state) {
    (void)state;
    /* whatever else is set: a worker inherits its launcher's environment */
    expect(ENV("VERLC_RANK=3", "VERLC_RANKS=4", "VERLC_LOCAL_RANK=1", "VERLC_LOCAL_RANKS=2", "RANK=0", "WORLD_SIZE=4",
               "MASTER_ADDR=a"),
           "verlc", 3, 4, 1, 2, -1, "", "");
    expect_refused(ENV("VERLC_RANK=3"), "VERLC_RANKS is not");
    expect_refused(ENV("VERLC_RANK=4", "VERLC_RANKS=4"), "VERLC_RANK=4 is not below VERLC_RANKS=4");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),  cmocka_unit_test(srun),        cmocka_unit_test(mpirun),
        cmocka_unit_test(torchrun), cmocka_unit_test(own_workers),
    };
    return cmocka_run_group_tests_name("comm launch", tests, NULL, NULL);
}
