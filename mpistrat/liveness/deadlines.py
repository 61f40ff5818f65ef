"""The seconds that ranks, observers and launchers wait for each other.

All numbers of seconds of `liveness`, `communicators` and `torch_distributed` stand here. A constant's name says who
waits for whom. "SLEEPS" names the pause between two looks. `tests/unit/test_deadlines.py` checks the order of the
limits, and gives the reasons.
"""

# A rank waits for other ranks in a call.
RANK_SPINS = 200e-6  # a sum of a few values on one node takes less
RANK_YIELDS = 2e-3  # after that the rank sleeps: others may need the core
RANK_SLEEPS_AT_LEAST = 50e-6  # the kernel wakes no thread up sooner
RANK_SLEEPS_AT_MOST = 1e-3  # this pause can make a call end later than necessary
# After a longer time between two looks of a waiting rank, the job was suspended: that time does not count.
RANK_STOOD_STILL = 1.0
# The observer looks twice a second, and announces a longer pause. After so many seconds without a look it is gone.
RANK_WAITS_FOR_LOOK_OF_OBSERVER = 5.0
# From a timeout until the observer has reported the missing ranks: it asks ranks, and other nodes, one by one.
RANK_WAITS_FOR_NOTICE_OF_OBSERVER = 8.0
# From a timeout until the observer ends the job, because ranks inside MPI cannot raise an error.
OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT = 15.0

# A rank waits for its node's observer.
RANK_WAITS_FOR_START_OF_OBSERVER = 10.0  # Python starts, on a file system that may be slow
# The observer can report how a rank died only if it saw the rank alive.
RANK_WAITS_FOR_FIRST_LOOK_OF_OBSERVER = 1.0
RANK_WAITS_FOR_OBSERVER_TO_SEE_EXIT = 1.0
# The observer may have to wait for the stderr of another process.
RANK_WAITS_FOR_WORDS_OF_OBSERVER = 1.5

# The observer looks at the ranks of its node.
OBSERVER_SLEEPS = 0.5  # deaths wake it up at once
OBSERVER_SLEEPS_AT_START = 0.05  # new ranks wait until the observer has seen them
OBSERVER_IS_NEW = 10.0  # the observer sleeps as at the start for so long
OBSERVER_WAITS_FOR_FIRST_RANK = 60.0  # a process that holds the folder has no record yet
# A script may start another program after the last rank has gone.
OBSERVER_WAITS_FOR_LATE_RANK = 2.0
# Some ranks have ended, and other ranks may not have started yet. By default, a rank that starts waits as long for the
# other ranks (MPISTRAT_START_SECONDS).
OBSERVER_WAITS_FOR_OTHERS_TO_START = 300.0
OBSERVER_STOOD_STILL = 2.0  # between two looks: the machine or the observer was suspended
# Deaths in this time after the first are judged together, because a launcher may kill the other ranks while the first
# rank still writes its core file.
OBSERVER_WAITS_FOR_JOINT_DEATHS = 0.4
OBSERVER_WAITS_FOR_JOINT_EXITS = 1.0  # if all ranks end with os._exit(0), they have finished
# Ranks have come to their ends, and others wait for them to start: a script may start the next program.
OBSERVER_WAITS_FOR_ABSENT_RANKS = 1.0

# The observer asks ranks, and reports.
OBSERVER_WAITS_FOR_STACK = 1.5  # a rank without a core may need a while to answer
OBSERVER_SLEEPS_UNTIL_STACK = 0.02
OBSERVER_WAITS_FOR_OTHER_NODES = 3.0
# The first node of the stalled communicator reports for the job; the other nodes wait so long for it.
OBSERVER_WAITS_FOR_FIRST_NODE = 4.0
# The longest report, on this or another node; the ranks trust in the observer meanwhile.
OBSERVER_REPORTS = 15.0
# The CPU time of ranks is measured for so long, to tell busy ranks from idle ones; a tick of the clock is 0.01.
OBSERVER_MEASURES_CPU_TIME = 0.3
OBSERVER_WAITS_FOR_WRITE = 2.0  # to stderr, which may be a file on a file system that hangs
OBSERVER_WAITS_FOR_REPORT_FILE = 0.1  # the file system may hang, and the ranks are to end meanwhile
OBSERVER_WAITS_FOR_REPORT_FILE_AT_END = 2.0  # no rank is left that could end meanwhile
NODE_WAITS_FOR_OTHER_NODES = 2.0  # a rank that asks other nodes for its observer
# A rank is called slow only if it waited so much less than another rank in the last minute.
STRAGGLER_WAITED_LESS = 1.0

# The observer or a rank has said that the job ends; the observer makes sure that it does.
OBSERVER_WAITS_FOR_TOLD_RANKS = 2.0  # for ranks that were told to end; then it kills them
# For a rank that has said that it ends the job: it flushes files, and tells other ranks.
OBSERVER_WAITS_FOR_ENDING_RANK = 10.0
# A rank has ended the job, and the launcher kills the other ranks; after this time the observer tells them to end.
OBSERVER_WAITS_FOR_LAUNCHER = 1.0
OBSERVER_WAITS_FOR_LAUNCHER_TO_READ = 0.2
OBSERVER_SLEEPS_BETWEEN_SIGNALS = 0.2  # to a launcher that would return 0

# A rank has failed.
# Ranks that all fail do so within moments: wait so long after the last failure.
RANK_WAITS_FOR_NEXT_FAILURE = 0.25
RANK_WAITS_FOR_ALL_FAILURES = 0.8  # the limit for all these waits together
RANK_WAITS_FOR_FAILURES_OF_OTHER_NODES = 0.3  # a rank listens five times a second
RANK_WAITS_FOR_FIRST_NODE_TO_PRINT = 0.4  # for an error that several nodes have in common
# For an error that this rank has only heard of, or has in common with rank 0.
RANK_WAITS_FOR_RANK_TO_PRINT = 0.7
RANK_WAITS_FOR_SENDING_OF_FAILURE = 0.2  # to other nodes
# For errors of other ranks: Open MPI's launcher reads the ranks' output in no particular order.
RANK_WAITS_FOR_LAUNCHER_TO_PASS_ON = 0.1
RANK_WAITS_FOR_LOCK_OF_FAILURES = 0.5  # a rank may hang while it prints
NOTED_FAILURE_COUNTS = 5.0  # under a fault tolerant MPI, the job and its folder outlive a rank
RANK_WAITS_FOR_ITS_STREAMS = 1.0  # to be flushed into files, on a file system that may hang
# MPICH's launcher drops output that it has not read when a rank aborts.
RANK_WAITS_FOR_LAUNCHER_TO_READ = 0.2
RANK_WAITS_FOR_LAUNCHER_TO_KILL = 2.0  # MPI_Abort of MPICH returns once the launcher has been told
# For the main thread, which may be in a call that takes a while.
RANK_WAITS_FOR_ANSWER_TO_INTERRUPT = 3.0
# The main thread is to raise StallError, and may come back from MPI.
RANK_WAITS_FOR_MAIN_THREAD_TO_RAISE = 2.0
# Python must not end while a thread is in a library; but the library may never return, not even from an abort.
RANK_WAITS_FOR_THREAD_IN_LIBRARY = 5.0

# Ranks come to their ends.
RANK_SLEEPS_WATCHING_GROUPS = 0.2  # the thread of `JobEnd`
RANK_IS_STUCK = 0.5  # after this time in a collective, a rank reports to the exit coordinator
# A rank knows that another rank has left the collective for an error, but may itself be about to leave it.
RANK_STAYS_IN_LEFT_COLLECTIVE = 1.0
# A collective of the communication thread ends in a moment, if all ranks take part in it.
RANK_WAITS_FOR_ITS_THREAD = 0.25
# Ranks that all leave with a failing sys.exit do so within moments.
COORDINATOR_WAITS_FOR_JOINT_EXITS = 1.0
RANK_WAITS_FOR_JOINT_EXITS = 1.0  # for the same, where only the records of this node are known
RANK_SLEEPS_AT_ITS_END = 0.001  # the first pause; each pause is longer than the last one …
RANK_SLEEPS_AT_ITS_END_AT_MOST = 0.05  # … up to this
RANK_WAITS_TO_COMPARE_AT_ITS_END = 10.0  # for the others, after the programs of all have ended
# After the loss of a rank: mpirun kills ranks that have not ended.
RANK_WAITS_FOR_EXIT_HANDLERS_OF_OTHERS = 60.0
# Between two looks at a condition that comes true in a moment, such as an os._exit that is to seem immediate.
SOON_SLEEPS = 0.001  # the first pause; each pause is longer than the last one …
SOON_SLEEPS_AT_MOST = 0.02  # … up to this
# A starting job may be about to map the files that MPI has just made.
CLEANER_WAITS_FOR_MAPPING = 60.0

# A rank is lost, or fails while the others wait for their accelerators.
RANK_SLEEPS_WATCHING_FAILURES = 0.01  # MPI reports a failure only to a rank that calls it
RANK_SLEEPS_WATCHING_ABORTS = 0.005
# A rank listens four times a second while its GPU works in a collective, and not at all otherwise.
RANK_WAITS_FOR_ABORTS_OF_OTHERS = 0.75
RANK_SLEEPS_WATCHING_KERNELS = 0.25
# A rank whose GPU takes longer for a collective writes so into its record.
RANK_WAITS_FOR_RECORD_OF_KERNEL = 1.0

# Communicators start, and measure ways of moving bytes.
RANK_WAITS_FOR_STORE = 300.0  # for a torch store that another rank opens
RANK_WAITS_FOR_NATIVE_GROUP = 30 * 86400.0  # practically no limit in torch: the observer has one
RANK_WAITS_FOR_TRIAL_OF_DEVICE = 90  # importing torch and starting an accelerator take their time
# Like `RANK_WAITS_FOR_LAUNCHER_TO_READ`, for a process that prints more.
TRIAL_WAITS_FOR_LAUNCHER_TO_READ = 0.5
RANK_MEASURES_CALLS = 4e-3  # for one way and buffer size in a round
RANK_MEASURES_ON_NODE = 0.3  # for all rounds; a call that has begun still ends
# For the ways of each slice, and as long for the ways of all ranks.
RANK_MEASURES_BETWEEN_NODES = 0.2
COSTS_LIVE = 7 * 86400.0  # older costs are forgotten: the machine may have been busy
COSTS_MAY_BE_AHEAD = 3600.0  # by the clock of the node that wrote the costs

# Messages of torch.distributed.
PROGRESS_THREAD_SLEEPS_AT_LEAST = 50e-6
PROGRESS_THREAD_SLEEPS_AT_MOST = 1e-3
RANK_WAITS_FOR_BYTES_OF_ENDED_RANK = 10.0
# A communication thread leaves calls to backward(), and backward() may wait for the future of one of these calls.
COMMUNICATION_THREAD_WAITS_FOR_BACKWARD = 2.0
# For calls on the communication thread in which other ranks may still take part.
PROGRAM_END_WAITS_FOR_CALLS = 5.0
