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

# --- announcements --------------------------------------------------------------------------------
#: On the span that says, in OTLP only, that a scope is still open.
PENDING = "cirron.pending"
#: On the root of a trace (a window's, the session's): what the export budget left out of it.
LEFT_OUT_SPANS = "cirron.left_out.spans"
LEFT_OUT_STEPS = "cirron.left_out.steps"

# --- marks of ours --------------------------------------------------------------------------------
#: What our own instrumentation took out of the scope it is on, in ns.
OVERHEAD = "cirron.overhead_ns"
#: Attribute of a mark whose value was sampled, not measured each time.
ESTIMATED = "estimated"

# --- metrics --------------------------------------------------------------------------------------
# Units, kinds and attributes are in `otlp/instruments.py`; how they are made in `docs/metrics.md`.
TRAIN_LOSS = "cirron.train.loss"
TRAIN_GRAD_NORM = "cirron.train.grad_norm"
TRAIN_LEARNING_RATE = "cirron.train.learning_rate"
TRAIN_TOKENS = "cirron.train.tokens"
TRAIN_SAMPLES = "cirron.train.samples"
STEP_DURATION = "cirron.step.duration"
PHASE_DURATION = "cirron.phase.duration"
LAST_STEP_TIME = "cirron.last_step.time"
#: The last value of every other mark with a number.
MARK_METRIC = "cirron.mark"
#: Marks that were NaN or infinite: such a value is no point of any series.
NONFINITE_METRIC = "cirron.mark.nonfinite"
QUEUE_AGE = "cirron.queue.age"
QUEUE_BATCHES = "cirron.queue.batches"
QUEUE_SIZE = "cirron.queue.size"
DELIVERY_BATCHES = "cirron.delivery.batches"
DELIVERY_FAILURES = "cirron.delivery.failures"
DROPPED_METRIC = "cirron.dropped"

# --- attributes of their points -------------------------------------------------------------------
PHASE = "cirron.phase"
DESTINATION = "cirron.destination"
#: Of a mark: its name.
NAME = "name"
#: Of what was lost: why, a key of ``health()["losses"]``.
REASON = "reason"
#: Of a batch: ``delivered``, ``rejected`` (set aside) or ``gone`` (evicted, cleared).
OUTCOME = "outcome"
#: OpenTelemetry's: everything past the cap on series.
OVERFLOW = "otel.metric.overflow"

# --- the training record --------------------------------------------------------------------------
#: Name of the log record that anchors a training record: its head at one moment.
RECORD_ANCHOR = "cirron.record.anchor"
#: Attributes of an anchor; the first three also stand on the scope it was made in (its last one).
RECORD_RUN_ID = "cirron.record.run_id"
RECORD_SEQ = "cirron.record.seq"
RECORD_HASH = "cirron.record.hash"
RECORD_METRICS_DIGEST = "cirron.record.metrics_digest"
RECORD_METRICS_ROWS = "cirron.record.metrics_rows"
RECORD_NAME = "cirron.record.name"
#: What the anchor was made at: ``run_start``, ``check`` or ``run_end``.
RECORD_EVENT = "cirron.record.event"
RECORD_STEP = "cirron.record.step"

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
