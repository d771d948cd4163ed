"""Every attribute, event and mark name we write, with its meaning.

OpenTelemetry's own word where there is one, ``dl.*`` (NVIDIA NeMo Lens) for facts it already
names, ``cirron.*`` for the rest. No other module spells such a name.
"""

from __future__ import annotations

# --- scopes -----------------------------------------------------------------------------------
#: The root of everything one ``profile()`` records in one process.
SESSION = "cirron.session"
EPOCH = "epoch"
#: One batch of the loop that owns training.
STEP = "step"
#: A part of a step: an inner loop inside it.
MICRO_BATCH = "micro_batch"
DATA_LOAD = "data_load"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER_STEP = "optimizer_step"
#: A pass over data without learning.
EVALUATION = "evaluation"

# --- attributes of the user's spans in the spool ------------------------------------------------
#: ``"Type: message"`` of the exception that ended a scope.
ERROR = "error"
#: The scope was still open when the process ended in an orderly way; we closed it.
TRUNCATED = "cirron.truncated"
#: On the session: the signal that ended the process.
INTERRUPTED = "cirron.interrupted"
#: The scope was still open when the process died; a reader closed it.
RECOVERED = "recovered"
#: Number of the DataLoader worker a scope was opened in.
WORKER_ID = "worker_id"
#: ``train`` or ``eval``: the mode of the outermost module of a forward.
MODE = "mode"

# --- attributes of exported spans ---------------------------------------------------------------
INDEX = "cirron.index"
SESSION_ID = "cirron.session.id"
#: Spool id of the canonical parent, where the OTel parent is another span.
PARENT_ID = "cirron.parent.id"
EPOCH_INDEX = "cirron.epoch"
RANK = "cirron.rank"
#: Monotonic over the whole run; ``cirron.index`` restarts with each epoch.
ITERATION = "dl.iteration"
THREAD_ID = "thread.id"
CPU_NS = "cirron.cpu_ns"
GPU_NS = "cirron.gpu_ns"
MEMORY_PEAK_BYTES = "cirron.memory_peak_bytes"
#: Prefix: last value of each mark of a span.
MARK_PREFIX = "cirron.mark."
ERROR_TYPE = "error.type"
EXCEPTION_EVENT = "exception"
EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"
EXCEPTION_STACKTRACE = "exception.stacktrace"

# --- attributes of mark events --------------------------------------------------------------------
# A mark's id is no attribute: it is its span's id followed by the event's time, 16 hex each.
#: Absent for a ``point``: what nearly every mark is, is not said each time.
MARK_KIND = "cirron.mark.kind"
#: Absent where ``value`` says it by its own type (int, double, bool or string).
MARK_VALUE_TYPE = "cirron.mark.value_type"
#: The value was not known when the span ended (it was on a device); it is in the spool.
MARK_DEFERRED = "cirron.mark.deferred"
MARK_NONFINITE = "cirron.mark.value_nonfinite"
MARK_VALUE = "value"

# --- marks of ours --------------------------------------------------------------------------------
#: What our own instrumentation took out of the scope it is on, in ns.
OVERHEAD = "cirron.overhead_ns"
#: Attribute of a mark whose value was sampled, not measured each time.
ESTIMATED = "estimated"

# --- resource -------------------------------------------------------------------------------------
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
HOST_NAME = "host.name"
PROCESS_PID = "process.pid"
DL_RANK = "dl.rank"
DL_WORLD_SIZE = "dl.world_size"
DL_LOCAL_RANK = "dl.local_rank"
RUN_ID = "cirron.run.id"
RUN_ATTEMPT = "cirron.run.attempt"
WORKSPACE_ID = "cirron.workspace.id"
PIPELINE_ID = "cirron.pipeline.id"
DEPLOYMENT_ID = "cirron.deployment.id"
MODEL_ID = "cirron.model.id"

#: Environment variable that tells a child process where its parent records.
CARRIER_VARIABLE = "CIRRON_OTEL_CARRIER"
#: Name of our instrumentation scope and distribution.
INSTRUMENTATION_NAME = "cirron-otel"
