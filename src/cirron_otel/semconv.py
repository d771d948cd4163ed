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
#: Waiting for the other ranks of a distributed training, inside the phase where it happens.
COLLECTIVE_WAIT = "collective_wait"
#: A compiler works, inside whatever had something to compile.
COMPILE = "compile"
#: A pass over data without learning.
EVALUATION = "evaluation"
#: A pass over data for its outputs.
PREDICTION = "prediction"
#: A short evaluation before the training, to see that it works.
SANITY_CHECK = "sanity_check"
#: The model or the whole state of the training is written or read.
CHECKPOINT = "checkpoint"
#: What an asynchronous save goes on with while the training does.
CHECKPOINT_BACKGROUND = "checkpoint_background"
#: From ``profile()`` to the first training step, where parts of it were seen; and these: a process
#: group is set up, modules are made, a data loader starts its workers.
STARTUP = "startup"
INIT, MODEL, LOADER = "init", "model", "loader"
#: Batches that an earlier attempt had are passed over; its attribute ``batches`` counts them.
RESUME_SKIP = "resume_skip"
#: One call of a service, from its beginning to the last part of its answer.
REQUEST = "request"
#: One call of a model's ``generate``.
GENERATE = "generate"
#: One computation for several requests.
BATCH = "batch"
#: Weights or gradients were looked at; its id is the owner of their rows and names their folder.
SNAPSHOT = "snapshot"

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
#: On a step of which a compiler or a first use took part: no measure of the steps to come.
WARMUP = "warmup"
#: ``train`` or ``eval``: the mode of the outermost module of a forward.
MODE = "mode"

# --- checkpoints ----------------------------------------------------------------------------------
#: ``save`` or ``load``.
CHECKPOINT_OPERATION = "cirron.checkpoint.operation"
#: ``torch``, ``distributed`` or ``safetensors``: whose functions were called.
CHECKPOINT_FORMAT = "cirron.checkpoint.format"
CHECKPOINT_PATH = "cirron.checkpoint.path"
#: Bytes that this process has written or read: of the file, or of its part of the tensors.
CHECKPOINT_BYTES = "cirron.checkpoint.bytes"

# --- snapshots ------------------------------------------------------------------------------------
# Attributes of the scope.
#: What made it: ``epoch_end``, ``last_step`` (gradients before its optimizer step), ``every`` or
#: ``call``.
SNAPSHOT_TRIGGER = "cirron.snapshot.trigger"
#: The ``name=`` of ``ci.snapshot``.
SNAPSHOT_NAME = "cirron.snapshot.name"
#: ``stats``, ``sampled`` or ``full``: what its rows are.
SNAPSHOT_MODE = "cirron.snapshot.mode"
#: How many rows, and how many bytes of tensors were written to files.
SNAPSHOT_TENSORS = "cirron.snapshot.tensors"
SNAPSHOT_BYTES = "cirron.snapshot.bytes"
#: On the row of a sharded tensor, of which this process described its part: how it is placed along
#: each dimension of the mesh, the mesh's size along each, and the shape of the whole.
TENSOR_PLACEMENTS = "cirron.tensor.placements"
TENSOR_MESH_SHAPE = "cirron.tensor.mesh_shape"
TENSOR_GLOBAL_SHAPE = "cirron.tensor.global_shape"
# Attributes of a row, each only where it says something.
#: The tensor is another name of this one, whose row and file have the values.
TIED_TO = "tied_to"
#: No parameter: state that is not trained.
BUFFER = "buffer"
#: Why there are no statistics.
SKIPPED = "skipped"
#: Keys of a safetensors file's metadata: span id, number of the step, ``cirron-otel <version>``.
FILE_SPAN, FILE_STEP, FILE_SDK = "span", "step", "sdk"

# --- attributes and marks of requests -------------------------------------------------------------
#: From the caller's ``x-request-id``, or new.
REQUEST_ID = "request_id"
#: How a stream ended: ``complete``, ``closed``, ``cancelled``, ``error``, ``abandoned`` or
#: ``not_started``.
STREAM_END = "cirron.stream.end"
#: The request went on after the span it is a child of (a server's) had ended.
OUTLIVED_PARENT = "cirron.request.outlived_parent"
REQUEST_DURATION_MS = "request_duration_ms"
TIME_TO_FIRST_TOKEN_MS = "time_to_first_token_ms"
TOKENS_PER_SECOND = "tokens_per_second"
INPUT_TOKENS = "input_tokens"
OUTPUT_TOKENS = "output_tokens"
TOTAL_TOKENS = "total_tokens"
OUTPUT_CHUNKS = "output_chunks"
#: Between two chunks: the median, the 95th percentile and the longest time.
INTER_TOKEN_MS_P50 = "inter_token_ms_p50"
INTER_TOKEN_MS_P95 = "inter_token_ms_p95"
INTER_TOKEN_MS_MAX = "inter_token_ms_max"
#: One chunk's time, only where it was asked for.
CHUNK_MS = "chunk_ms"

# --- attributes of exported spans ---------------------------------------------------------------
INDEX = "cirron.index"
SESSION_ID = "cirron.session.id"
#: Spool id of the canonical parent, where the OTel parent is another span.
PARENT_ID = "cirron.parent.id"
EPOCH_INDEX = "cirron.epoch"
RANK = "cirron.rank"
BATCH_SIZE = "dl.batch_size"
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

# --- marks that framework hooks make -------------------------------------------------------------
LOSS = "loss"
LEARNING_RATE = "learning_rate"
#: How many tokens a step was given; how many samples is ``SAMPLES``.
TOKENS = "tokens"
#: Prefix: what the framework itself logged, as it logged it.
LOG_PREFIX = "log/"
#: Attribute of such a mark: the framework's number of finished steps.
LOG_STEP = "step"
#: Attribute of a mark that was given to a tracker: to which one.
TEE = "tee"
#: Attribute of an epoch that a framework's loop opened: which framework.
FRAMEWORK = "framework"

# --- estimators of scikit-learn's kind ------------------------------------------------------------
# Scopes bear the names of the methods that were called.
#: Attribute: the class of the estimator.
ESTIMATOR = "estimator"
#: Attribute: its name in the pipeline, union or column transformer that it is a part of.
ESTIMATOR_STEP = "step"
#: Attribute: rows of the data it was called with.
SAMPLES = "samples"
#: Marks: what ``score`` returned; the best mean of a search.
SCORE = "score"
BEST_SCORE = "best_score"
#: Attribute of a candidate's mark: its number in the search.
CANDIDATE = "candidate"
#: Mark of a round of boosting where nothing is evaluated: how many there were.
ROUND = "round"

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
#: Marks and metrics: counts of training steps over the lengths of the same steps, 1/s; and the
#: share of the device's peak that the model's operations are.
TRAIN_TOKENS_PER_SECOND = "cirron.train.tokens_per_second"
TRAIN_SAMPLES_PER_SECOND = "cirron.train.samples_per_second"
TRAIN_MFU = "cirron.train.mfu"
#: Attribute of the session: the last of those rates.
DL_TOKENS_PER_SECOND = "dl.throughput_tokens_per_sec"
STEP_DURATION = "cirron.step.duration"
PHASE_DURATION = "cirron.phase.duration"
LAST_STEP_TIME = "cirron.last_step.time"
#: Marks and metrics of the run as a whole: the share that is done, seconds to the end, and seconds
#: by category since the mark before.
PROGRESS = "cirron.progress"
ETA = "cirron.eta"
RUN_TIME = "cirron.run.time"
#: Attribute of such a mark and of the metric's points.
CATEGORY = "category"
#: On the session, in metrics and in ``health()``: how it ended; and the signal, where one ended it.
RUN_OUTCOME = "cirron.run.outcome"
RUN_SIGNAL = "cirron.run.signal"
#: On the session: training steps made, and seconds from the start of the process to ``profile()``.
RUN_STEPS = "cirron.run.steps"
RUN_BEFORE_PROFILE = "cirron.run.before_profile"
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

# --- heartbeats ---------------------------------------------------------------------------------
#: Name of the log record that says where a process is.
HEARTBEAT = "cirron.heartbeat"
#: The scopes that have been open for long, the outermost first (``epoch[3]``), the ids of their
#: spans, and for how many seconds each; the number of all of them.
HEARTBEAT_SCOPES = "cirron.heartbeat.scopes"
HEARTBEAT_SPANS = "cirron.heartbeat.span_ids"
HEARTBEAT_OPEN = "cirron.heartbeat.open"
HEARTBEAT_COUNT = "cirron.heartbeat.count"

# --- findings -----------------------------------------------------------------------------------
#: Name of the log record and of the mark of a finding; the mark's value is the message.
FINDING = "cirron.finding"
FINDING_KIND = "cirron.finding.kind"
#: ``info``, ``warning`` or ``critical``.
FINDING_SEVERITY = "cirron.finding.severity"
#: Name of the module in the model.
FINDING_LAYER = "cirron.finding.layer"
#: The optimizer step, from 0, at which it was seen.
FINDING_STEP = "cirron.finding.step"

# Of the finding `hang`: what stands still (see run/watchdog.py), for how many seconds, in which
# scopes, at which iteration; who waits for whom among the ranks, and the stack of every thread.
HANG_PHASE = "cirron.hang.phase"
HANG_SECONDS = "cirron.hang.seconds"
HANG_SCOPES = "cirron.hang.scopes"
HANG_ITERATION = "cirron.hang.iteration"
HANG_RANKS = "cirron.hang.ranks"
HANG_STACKS = "cirron.hang.stacks"

# Of the finding `straggler`: whose fault it is; lengths in s, medians over the steps looked at.
STRAGGLER_RANK = "cirron.straggler.rank"
#: ``data``, ``forward``, ``backward``, ``optimizer`` or ``other``.
STRAGGLER_PHASE = "cirron.straggler.phase"
STRAGGLER_HOST = "cirron.straggler.host"
#: What it takes longer than the other ranks, and a step as a whole.
STRAGGLER_EXCESS = "cirron.straggler.excess"
STRAGGLER_STEP = "cirron.straggler.step"
#: In how many of how many steps it was slower than the others.
STRAGGLER_SLOW_STEPS = "cirron.straggler.slow_steps"
STRAGGLER_STEPS = "cirron.straggler.steps"

# Of the finding `data_stall`: which share of how many steps was `data_load`; medians in s.
DATA_STALL_SHARE = "cirron.data_stall.share"
DATA_STALL_STEPS = "cirron.data_stall.steps"
DATA_STALL_DATA_LOAD = "cirron.data_stall.data_load"
DATA_STALL_STEP = "cirron.data_stall.step"

# --- language models: OpenTelemetry's names for generative AI -----------------------------------
#: ``chat``, ``text_completion``, ``embeddings``, or a word of the service's own.
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
#: True where the answer comes in parts.
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
#: Seconds from the start of the request to the first part of the answer.
GEN_AI_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_CACHE_WRITE = "gen_ai.usage.cache_creation.input_tokens"
GEN_AI_REASONING = "gen_ai.usage.reasoning.output_tokens"
#: Texts of request and answer, only where ``record_content`` asks for them.
CONTENT_INPUT = "cirron.request.content"
CONTENT_OUTPUT = "cirron.response.content"
HTTP_METHOD = "http.request.method"
#: The path as the application routes it, with its parameters' names.
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
#: For whom a request is answered; limits may hold for each tenant.
TENANT = "cirron.tenant"
#: True where the output tokens come from the service's own counter, not from the model.
TOKENS_ESTIMATED = "cirron.usage.estimated"

# vLLM's names for what its engine measured, in seconds.
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_INFERENCE = "gen_ai.latency.time_in_model_inference"

# Metrics of a service, and the attributes of their points beside those above.
SERVER_DURATION = "gen_ai.server.request.duration"
SERVER_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
SERVER_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"

# --- memory ---------------------------------------------------------------------------------------
# Marks of a step, and metrics: what torch's allocator holds of the accelerator, in bytes.
MEMORY_ALLOCATED = "cirron.memory.allocated"
MEMORY_RESERVED = "cirron.memory.reserved"
MEMORY_PEAK = "cirron.memory.peak"
#: Attribute where there are several: ``cuda:1``.
MEMORY_DEVICE = "cirron.memory.device"
#: Of the finding `out_of_memory`: the largest blocks in use, with their owners where known.
MEMORY_BLOCKS = "cirron.memory.blocks"
#: Mark and metric: the resident set, OpenTelemetry's name.
PROCESS_MEMORY = "process.memory.usage"

#: Marks that are made for metrics, some every few seconds: no span and no tree shows them.
FOR_METRICS = frozenset({OVERHEAD, PROGRESS, ETA, RUN_TIME, PROCESS_MEMORY})

# --- windows of torch's profiler ------------------------------------------------------------------
#: On each step that was recorded: the file, from the output directory on.
PROFILE_FILE = "cirron.profile.file"
#: Name of the log record of a file that was written, and its attributes.
PROFILE_WINDOW = "cirron.profile.window"
PROFILE_STEPS = "cirron.profile.steps"
PROFILE_BYTES = "cirron.profile.bytes"

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
K8S_NAMESPACE = "k8s.namespace.name"
K8S_POD_NAME = "k8s.pod.name"
K8S_POD_UID = "k8s.pod.uid"
K8S_NODE = "k8s.node.name"
#: UUID of the GPU, by which DCGM's metrics name it too.
GPU_ID = "hw.id"
#: The commit that the program was at.
COMMIT = "vcs.ref.head.revision"

#: Environment variable that tells a child process where its parent records.
CARRIER_VARIABLE = "CIRRON_OTEL_CARRIER"
#: Name of our instrumentation scope and distribution.
INSTRUMENTATION_NAME = "cirron-otel"
