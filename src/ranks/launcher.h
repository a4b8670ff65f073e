/* launcher.h - which rank this process is, from the environment of whatever started it.
 *
 * torchrun (RANK, WORLD_SIZE, ...), Open MPI (OMPI_COMM_WORLD_*), MPICH and Intel MPI (PMI_*), Slurm's srun (SLURM_*) and verlc's
 * own workers (VERLC_RANK, ...). Each of them only has to start the same command once per rank, or once per node.
 * Invariant: a function of the environment alone; what is set and makes no sense is an error that names the variable. */
#ifndef VERLC_RANKS_LAUNCHER_H
#define VERLC_RANKS_LAUNCHER_H

struct launch {
    const char *by;    /* "srun", "torchrun", ..., "verlc" for a worker that verlc started; NULL: started by hand */
    int rank, size;    /* 0 and 1 where nothing says otherwise */
    int local_rank;    /* within its host */
    int local_size;    /* ranks on this host; 0: not known */
    int node;          /* index of the host; -1: not known */
    char address[256]; /* a host name of the first rank; "": not known */
    char job[192];     /* the same on all ranks of one start, and another one at the next; "": not known */
};
/* env: as environ. ERR_INVAL. */
int launch_read(struct launch *l, char *const *env);

#endif
