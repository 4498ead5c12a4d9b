"""Who this process is among the ranks of a job, whoever started it, and where rank 0 listens.

The launchers, in the order in which their variables count (the first that is found decides):

1. `polyreme run`: POLYREME_LAUNCHER=run with the variables of 3.
2. torchrun: TORCHELASTIC_RUN_ID with the variables of 3.
3. RANK and WORLD_SIZE (LOCAL_RANK, LOCAL_WORLD_SIZE), MASTER_ADDR, MASTER_PORT set by anybody.
4. Open MPI's mpirun: OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE.
5. MPICH's and Intel's mpiexec (Hydra), PALS: PMI_RANK, PMI_SIZE (MPI_LOCALRANKID, MPI_LOCALNRANKS or
   PMI_LOCAL_RANK, PMI_LOCAL_SIZE), unless they only repeat what srun says.
6. Slurm's srun, with or without PMI or PMIx: SLURM_PROCID in a step, SLURM_STEP_NUM_TASKS. The script
   of sbatch is one rank.
7. None: one rank.

So torchrun under srun is torchrun, and mpirun inside an allocation of Slurm is mpirun.

`variables` says what the launcher said, a pure function; `meeting` opens what is needed for the ranks
to find rank 0.
"""

from .meeting import Meeting, meet
from .variables import RankEnvironment, read_rank_environment

__all__ = ["Meeting", "RankEnvironment", "meet", "read_rank_environment"]
