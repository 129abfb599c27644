/* Times collectives of an MPI library between processes of one machine, in the way the Gloo script does it:
 * barrier, call, clock; the slowest rank of a round counts, and the median of the rounds is told, one JSON row per line.
 *
 *   mpicc -O2 tools/bench/collectives_mpi.c -o collectives_mpi && mpirun -n 2 ./collectives_mpi
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPS = 4 };
static const char *names[OPS] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"};

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void call(int op, float *x, float *out, int full, int ranks) {
    int part = full / ranks;
    switch (op) {
    case 0: MPI_Allreduce(MPI_IN_PLACE, x, full, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 1: MPI_Allgather(x, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD); break;
    case 2: MPI_Reduce_scatter_block(x, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    default: MPI_Alltoall(x, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
    }
}

int main(int argc, char **argv) {
    static const size_t sizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s];
        int full = (int)(bytes / sizeof(float)), rounds = bytes < (256 << 10) ? 2001 : bytes < (2 << 20) ? 301 : 21;
        float *x = calloc(full, sizeof(float)), *out = malloc(bytes);
        double *times = malloc(rounds * sizeof(double));
        if (!x || !out || !times) MPI_Abort(MPI_COMM_WORLD, 1);
        memset(out, 0, bytes);
        for (int op = 0; op < OPS; op++) {
            for (int round = -3; round < rounds; round++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double start = MPI_Wtime();
                call(op, x, out, full, ranks);
                if (round >= 0) times[round] = MPI_Wtime() - start;
            }
            MPI_Allreduce(MPI_IN_PLACE, times, rounds, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            qsort(times, rounds, sizeof(double), by_value);
            if (rank == 0) printf("{\"op\":\"%s\",\"bytes\":%zu,\"median_us\":%.2f}\n", names[op], bytes, times[rounds / 2] * 1e6);
        }
        free(x);
        free(out);
        free(times);
    }
    MPI_Finalize();
    return 0;
}
