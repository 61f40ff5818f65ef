"""How many seconds ranks, observers and launchers wait for each other.

All such numbers of `liveness`, `communicators` and `torch_distributed` stand here. A name says who waits, and for whom.
"SLEEPS" is the pause between two looks. `tests/unit/test_deadlines.py` holds the order of the limits, with the reasons.
"""

# A rank waits for the others in a call.
RANK_SPINS = 200e-6  # a sum of a few values on one node takes less
RANK_YIELDS = 2e-3  # then it sleeps: others may need the core
RANK_SLEEPS_AT_LEAST = 50e-6  # the kernel wakes nobody up sooner
RANK_SLEEPS_AT_MOST = 1e-3  # so much later than necessary a call may end
# Between two looks of a waiting rank: the job was suspended, and has not waited meanwhile.
RANK_STOOD_STILL = 1.0
# The observer looks twice a second, and says when it is to take longer: one that has not looked for so long is gone.
RANK_WAITS_FOR_LOOK_OF_OBSERVER = 5.0
# After a timeout, until the observer has said for whom the rank waits: it asks ranks, and other nodes, one by one.
RANK_WAITS_FOR_NOTICE_OF_OBSERVER = 8.0
# After a timeout the ranks raise an error; those that cannot, in MPI for one, have so long until the job is ended.
OBSERVER_WAITS_FOR_ERRORS_AFTER_TIMEOUT = 15.0

# A rank waits for its node's observer.
RANK_WAITS_FOR_START_OF_OBSERVER = 10.0  # Python starts, on a file system that may be slow
# The observer can tell how a rank died only if it saw the rank alive.
RANK_WAITS_FOR_FIRST_LOOK_OF_OBSERVER = 1.0
RANK_WAITS_FOR_OBSERVER_TO_SEE_EXIT = 1.0
# The observer may have to wait for the stderr of another process.
RANK_WAITS_FOR_WORDS_OF_OBSERVER = 1.5

# The observer looks at the ranks of its node.
OBSERVER_SLEEPS = 0.5  # deaths wake it up at once
OBSERVER_SLEEPS_AT_START = 0.05  # ranks are there in a moment, and wait to be seen
OBSERVER_IS_NEW = 10.0  # for so long it sleeps as at the start
OBSERVER_WAITS_FOR_FIRST_RANK = 60.0  # somebody holds the folder, and has no record yet
# A script may start another program after the last rank has gone.
OBSERVER_WAITS_FOR_LATE_RANK = 2.0
# Ranks have ended, and others may be still to start. These would wait as long by default (MPISTRAT_START_SECONDS).
OBSERVER_WAITS_FOR_OTHERS_TO_START = 300.0
OBSERVER_STOOD_STILL = 2.0  # between two looks: the machine or the observer was suspended
# Deaths so soon after the first are judged together: a launcher kills the others while the first may write its core.
OBSERVER_WAITS_FOR_JOINT_DEATHS = 0.4
OBSERVER_WAITS_FOR_JOINT_EXITS = 1.0  # ranks that all end with os._exit(0) have finished
# Ranks at their ends that others wait for, to start: a script may go on.
OBSERVER_WAITS_FOR_ABSENT_RANKS = 1.0

# The observer asks, and reports.
OBSERVER_WAITS_FOR_STACK = 1.5  # a rank without a core may need a while to answer
OBSERVER_SLEEPS_UNTIL_STACK = 0.02
OBSERVER_WAITS_FOR_OTHER_NODES = 3.0
# The report of the stalled communicator's first node speaks for the job.
OBSERVER_WAITS_FOR_FIRST_NODE = 4.0
OBSERVER_REPORTS = 15.0  # at most, here or on another node: ranks do not take it for gone meanwhile
# Of ranks, to tell busy ones from idle ones; a tick of the clock is 0.01.
OBSERVER_MEASURES_CPU_TIME = 0.3
OBSERVER_WAITS_FOR_WRITE = 2.0  # to stderr, which may be a file on a file system that hangs
OBSERVER_WAITS_FOR_REPORT_FILE = 0.1  # likewise; ranks are to end meanwhile
OBSERVER_WAITS_FOR_REPORT_FILE_AT_END = 2.0  # no rank is left that could end meanwhile
NODE_WAITS_FOR_OTHER_NODES = 2.0  # a rank that asks other nodes for its observer
STRAGGLER_WAITED_LESS = 1.0  # in the last minute than another rank, or no rank is said to be slow

# The observer sees to the end of a job that it, or a rank, has said to end.
OBSERVER_WAITS_FOR_TOLD_RANKS = 2.0  # that it has told to end; then it kills them
# A rank that has said that it ends the job: it flushes files, and tells others.
OBSERVER_WAITS_FOR_ENDING_RANK = 10.0
# To kill the others, when a rank has ended the job; then it tells them.
OBSERVER_WAITS_FOR_LAUNCHER = 1.0
OBSERVER_WAITS_FOR_LAUNCHER_TO_READ = 0.2
OBSERVER_SLEEPS_BETWEEN_SIGNALS = 0.2  # to a launcher that would return 0

# A rank has failed.
# Ranks that all fail do so a moment apart: so long after the last one.
RANK_WAITS_FOR_NEXT_FAILURE = 0.25
RANK_WAITS_FOR_ALL_FAILURES = 0.8  # and so long at most
RANK_WAITS_FOR_FAILURES_OF_OTHER_NODES = 0.3  # a rank listens five times a second
RANK_WAITS_FOR_FIRST_NODE_TO_PRINT = 0.4  # an error that several nodes have in common
# The error that this rank only hears of, or has in common with rank 0.
RANK_WAITS_FOR_RANK_TO_PRINT = 0.7
RANK_WAITS_FOR_SENDING_OF_FAILURE = 0.2  # to other nodes
# Errors of other ranks: Open MPI's launcher reads ranks in no order.
RANK_WAITS_FOR_LAUNCHER_TO_PASS_ON = 0.1
RANK_WAITS_FOR_LOCK_OF_FAILURES = 0.5  # a rank may hang while it prints
NOTED_FAILURE_COUNTS = 5.0  # under a fault tolerant MPI, the job and its folder outlive a rank
RANK_WAITS_FOR_ITS_STREAMS = 1.0  # to be flushed, into files that may hang
# MPICH's launcher drops the words that it has not read when a rank aborts
RANK_WAITS_FOR_LAUNCHER_TO_READ = 0.2
RANK_WAITS_FOR_LAUNCHER_TO_KILL = 2.0  # MPI_Abort of MPICH returns once the launcher knows
# By the main thread, which may be in a call that takes a while.
RANK_WAITS_FOR_ANSWER_TO_INTERRUPT = 3.0
# A stall that is to be raised: the main thread may come back from MPI.
RANK_WAITS_FOR_MAIN_THREAD_TO_RAISE = 2.0
# Python must not end while a thread of it is in a library; but a library may not come back, not even from an abort.
RANK_WAITS_FOR_THREAD_IN_LIBRARY = 5.0

# Ranks come to their ends.
RANK_SLEEPS_WATCHING_GROUPS = 0.2  # by the thread of `JobEnd`
RANK_IS_STUCK = 0.5  # in a collective: it reports so to the exit coordinator
# That another rank has left for an error; it may be about to leave, too.
RANK_STAYS_IN_LEFT_COLLECTIVE = 1.0
# A collective of the communication thread ends in a moment, if all ranks take part in it.
RANK_WAITS_FOR_ITS_THREAD = 0.25
# Ranks that all leave with a failing sys.exit do so a moment apart.
COORDINATOR_WAITS_FOR_JOINT_EXITS = 1.0
RANK_WAITS_FOR_JOINT_EXITS = 1.0  # likewise, by the records of one node
RANK_SLEEPS_AT_ITS_END = 0.001  # at first; then longer and longer …
RANK_SLEEPS_AT_ITS_END_AT_MOST = 0.05  # … up to this
# When a rank was lost: mpirun kills those that have not ended.
RANK_WAITS_FOR_EXIT_HANDLERS_OF_OTHERS = 60.0
# Between two looks at a condition that comes true in a moment, such as an os._exit that is to seem immediate
SOON_SLEEPS = 0.001  # at first; then longer and longer …
SOON_SLEEPS_AT_MOST = 0.02  # … up to this
# A starting job may be about to map the files of MPI that it has just made.
CLEANER_WAITS_FOR_MAPPING = 60.0

# A rank is lost, or fails while the others wait for their accelerators.
RANK_SLEEPS_WATCHING_FAILURES = 0.01  # MPI is asked: it tells only who calls it
RANK_SLEEPS_WATCHING_ABORTS = 0.005
# A rank listens four times a second while its GPU works for others, and not at all otherwise.
RANK_WAITS_FOR_ABORTS_OF_OTHERS = 0.75
RANK_SLEEPS_WATCHING_KERNELS = 0.25
RANK_WAITS_FOR_RECORD_OF_KERNEL = 1.0

# Communicators start, and measure what they may do.
RANK_WAITS_FOR_STORE = 300.0  # of torch, which another rank opens
RANK_WAITS_FOR_NATIVE_GROUP = 30 * 86400.0  # no limit of the library's: the observer has one
RANK_WAITS_FOR_TRIAL_OF_DEVICE = 90  # importing torch and starting an accelerator take their time
# As `RANK_WAITS_FOR_LAUNCHER_TO_READ`, of a process with more to say.
TRIAL_WAITS_FOR_LAUNCHER_TO_READ = 0.5
RANK_MEASURES_CALLS = 4e-3  # of one way and size in a round
RANK_MEASURES_ON_NODE = 0.3  # for all rounds; a call that has begun ends, too
RANK_MEASURES_BETWEEN_NODES = 0.2  # for the ways of each slice, and as long for those of all ranks
COSTS_LIVE = 7 * 86400.0  # so that what was measured on a busy machine is forgotten
COSTS_MAY_BE_AHEAD = 3600.0  # by the clock of the node that wrote them

# Messages of torch.distributed.
PROGRESS_THREAD_SLEEPS_AT_LEAST = 50e-6
PROGRESS_THREAD_SLEEPS_AT_MOST = 1e-3
RANK_WAITS_FOR_BYTES_OF_ENDED_RANK = 10.0
# A communication thread leaves calls to backward(), which may wait for the future of one of them.
COMMUNICATION_THREAD_WAITS_FOR_BACKWARD = 2.0
# On the communication thread, in which other ranks may still take part.
PROGRAM_END_WAITS_FOR_CALLS = 5.0
