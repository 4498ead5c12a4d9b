/* A rank of `polyreme bench comm --against mpi`: times MPI collectives on float, as the OSU benchmarks do.
 *
 * mpi_loops FOLDER: reads lines "OP COUNT ITERATIONS" from FOLDER/rank<R> until it ends; rank 0 answers each
 * with a line, the seconds of one operation, the mean of its iterations, of the slowest rank. COUNT is what a
 * rank holds in full. The commands come through a file of each rank, and not through MPI, since a rank that
 * waits in MPI keeps a core busy, which the other contenders need. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum op { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };

static void run_once(enum op op, float* full, float* part, int count, int size) {
  if (op == ALL_REDUCE)
    MPI_Allreduce(MPI_IN_PLACE, full, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (op == REDUCE_SCATTER)
    MPI_Reduce_scatter_block(full, part, count / size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else
    MPI_Allgather(part, count / size, MPI_FLOAT, full, count / size, MPI_FLOAT, MPI_COMM_WORLD);
}

int main(int argc, char** argv) {
  char path[4096], name[32];
  int rank, size, count, iterations;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc != 2) MPI_Abort(MPI_COMM_WORLD, 2);
  snprintf(path, sizeof(path), "%s/rank%d", argv[1], rank);
  FILE* commands = fopen(path, "r");
  if (commands == NULL) MPI_Abort(MPI_COMM_WORLD, 3);
  while (fscanf(commands, "%31s %d %d", name, &count, &iterations) == 3) {
    const enum op op = strcmp(name, "all_reduce") == 0       ? ALL_REDUCE
                       : strcmp(name, "reduce_scatter") == 0 ? REDUCE_SCATTER
                                                             : ALL_GATHER;
    float* full = malloc(sizeof(float) * (size_t)count);
    float* part = malloc(sizeof(float) * (size_t)(count / size));
    if (full == NULL || part == NULL) MPI_Abort(MPI_COMM_WORLD, 4);
    for (int i = 0; i < count; ++i) full[i] = 1.0f;
    for (int i = 0; i < count / size; ++i) part[i] = 1.0f;
    run_once(op, full, part, count, size); /* warms up */
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < 3; ++i) run_once(op, full, part, count, size); /* as the other contenders do */
    const double start = MPI_Wtime();
    for (int i = 0; i < iterations; ++i) run_once(op, full, part, count, size);
    double seconds = (MPI_Wtime() - start) / iterations, slowest = 0;
    MPI_Reduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
      printf("%.9e\n", slowest);
      fflush(stdout);
    }
    free(full);
    free(part);
  }
  MPI_Finalize();
  return 0;
}
