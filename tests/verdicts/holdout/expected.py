"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

WAITS: Final = r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader"
GROWS: Final = r"grow|leak|accumulat|\bkeeps?\b|\bkept\b|rises|increas"
# Who keeps the memory, or where it is allocated.
KEEPER: Final = r"epoch_outputs|\boutputs|EpochSummary|Restorer|restored|on_train_batch_end|training_step|memory\.py:\d"
RECORDS: Final = r"\bgraph|grad_fn|entropy|\bpages\b|Notebook|log_metrics|logger|training_step|memory\.py:\d"
CACHE: Final = r"cach|\bwaves\b|\bencoding\b|Scanner|training_step|memory\.py:\d"
DATASET: Final = r"__getitem__|\bdata ?set\b|\bfetch"

EXPECTED: Final[tuple[Expected, ...]] = (
    Expected(
        name="raw_texts",
        script="data.py",
        cause=(r"collat|\btogether\b|tokeni[sz]|Vocabulary|\bencod(e|es|ing)\b",),
        near=(WAITS,),
        fix=(r"collat|\btogether\b|tokeni[sz]|Vocabulary|\bencod(e|es|ing)\b|preprocess|once|offline|in advance",),
        near_fix=(r"workers",),
    ),
    Expected(
        name="scattered_files",
        script="data.py",
        cause=(
            rf"{DATASET}|Recordings|np\.load|numpy\.load",
            r"\b(open|read)\w* .*files?|(small|many) files|decod|pars(e|ing)",
        ),
        near=(WAITS,),
        fix=(
            r"__getitem__|Recordings|np\.load|memory.?map|memmap|mmap|one file|fewer files|larger files|shard|cach",
            r"preprocess|precomput|once|offline|decod",
        ),
        near_fix=(r"num_workers|workers|data ?set",),
    ),
    Expected(
        name="locked_archive",
        script="data.py",
        cause=(
            r"\block(s|ed)?\b|acquire|serial|one at a time|take turns",
            rf"({DATASET}|Spectra|Archive).*(wait|block|sleep|idle|off the CPU|no CPU|slow|takes)",
            rf"workers? .*(wait|block|sleep|idle).*({DATASET}|Spectra|Archive|read)",
        ),
        near=(WAITS,),
        fix=(
            r"\block(s|ed)?\b|own (handle|file|reader|archive)|worker_init_fn|each worker|per worker",
            r"Archive|__getitem__",
        ),
        near_fix=(r"data ?set|\bread",),
    ),
    Expected(
        name="lone_worker",
        script="data.py",
        cause=(
            r"\b(one|1|single|only|too few|num_workers ?= ?1)\b.*workers?",
            r"workers? .*(too few|cannot keep up|not keep up|falls? behind|slower|wait|busy|saturated)",
            rf"({DATASET}|Thumbnails|RemoteStore).*(wait|block|sleep|idle|slow|takes)",
        ),
        near=(WAITS,),
        fix=(r"num_workers ?= ?([2-9]|\d\d)|(more|raise|increase).*workers|workers.*(raise|increase)",),
        near_fix=(r"prefetch|workers|cach|batch(ed|es)? (read|request)|__getitem__|__getitems__|asynchron",),
    ),
    Expected(
        name="dumped_predictions",
        script="host.py",
        cause=(
            r"SegmentationArtifacts|ArtifactWriter|\bjson\b",
            r"callback.*(on_train_batch_end|writ|file|takes)|on_train_batch_end.*callback",
        ),
        near=(r"callback|on_train_batch_end|\bhooks?\b",),
        fix=(
            r"SegmentationArtifacts|ArtifactWriter|\bjson\b|\bcollect\b|on_train_batch_end",
            r"(every|each) (n|\d+)|less often|fewer (steps|batches)|background|another thread|asynchron",
        ),
        near_fix=(r"callback|hook|tolist",),
        accuse=(r"SegmentationArtifacts|ArtifactWriter|\bjson\b", r"callback.*(\d+%|takes)|on_train_batch_end"),
    ),
    Expected(
        name="quantile_clipping",
        script="host.py",
        cause=(r"configure_gradient_clipping|quantile|\bsort", r"(gradient )?clipping.*(takes|\d+%|costs|slow)"),
        near=(r"clip|optimi[sz]er|\bhooks?\b",),
        fix=(r"configure_gradient_clipping|quantile|\bsort|clip_grad_norm|gradient_clip_val|by norm|kthvalue",),
        near_fix=(r"clip|less often|foreach",),
        accuse=(r"configure_gradient_clipping|quantile|\bsort", r"clip\w* .*([2-9]\d|100)%"),
    ),
    Expected(
        name="short_epochs",
        script="host.py",
        cause=(r"validat",),
        near=(r"\bepochs?\b|\beval",),
        fix=(
            r"check_val_every_n_epoch|val_check_interval|limit_val_batches",
            r"validat\w* .*(less often|rarely|fewer|every|interval)|(less often|fewer).*validat|longer epochs",
        ),
        near_fix=(r"validat|\bepochs?\b",),
        accuse=(r"validat\w* .*([2-9]\d|100)%|validat\w* .*(each|every|often)|([2-9]\d|100)% .*validat",),
    ),
    Expected(
        name="anomaly_region",
        script="host.py",
        cause=(r"anomaly",),
        near=(r"(?<!profiler )overhead|debug|traceback|format_stack|isnan|host-bound|python",),
        fix=(r"anomaly",),
        near_fix=(r"debug|guarded",),
        accuse=(r"anomaly",),
    ),
    Expected(
        name="eager_messages",
        script="host.py",
        cause=(
            r"\bdescribe\b|_tensor_str|__format__|__repr__|format(s|ted|ting)? .*tensors?|tensors? .*(print|format)",
            r"(debug|logging|log) (message|call|record|statement)s?|logger\.debug|f-strings?|repr",
        ),
        near=(r"python|host-bound|training_step|\.item\(|small (op|kernel)|(?<!profiler )overhead",),
        fix=(r"\bdescribe\b|logger\.debug|\bdebug\b|f-strings?|lazy|lazily|%s|isEnabledFor|format|print|repr",),
        near_fix=(r"training_step|logging|\.item\(|python",),
        accuse=(r"\bdescribe\b|_tensor_str|__format__|format|f-string|logger\.debug|debug message",),
    ),
    Expected(
        name="unread_outputs",
        script="memory.py",
        cause=(
            rf"({GROWS}).*({KEEPER})",
            rf"({KEEPER}).*({GROWS})",
        ),
        near=(GROWS,),
        fix=(
            r"epoch_outputs|EpochSummary|on_train_batch_end|running (sum|mean|total)|torchmetrics|MeanMetric|\.item\(",
            r"outputs .*(list|append|clear|reduce)|(list|append|clear|reduce).*outputs",
        ),
        near_fix=(r"tensor|hold|refer|snapshot|list|append|attribute",),
        accuse=(
            r"(memory|RSS|tensors?|live bytes|outputs).*(grow|leak)",
            r"(grow|leak).*(memory|RSS|MiB|tensor|outputs)",
        ),
    ),
    Expected(
        name="attached_records",
        script="memory.py",
        cause=(
            rf"({GROWS}).*({RECORDS})",
            rf"({RECORDS}).*({GROWS})",
        ),
        near=(GROWS, r"\bgraph\b"),
        fix=(r"detach|\.item\(|float\(|Notebook|log_metrics|graph",),
        near_fix=(r"tensor|hold|refer|snapshot|list|logger|append",),
        accuse=(r"(memory|RSS|tensors?|live bytes|graph).*(grow|leak)", r"(grow|leak).*(memory|RSS|MiB|tensor|graph)"),
    ),
    Expected(
        name="memoized_tables",
        script="memory.py",
        cause=(
            rf"({GROWS}).*({CACHE})",
            rf"({CACHE}).*({GROWS})",
            r"lru_cache",
        ),
        near=(GROWS,),
        fix=(r"cach|maxsize|\bwaves\b|memoi[sz]|\bencoding\b",),
        near_fix=(r"tensor|hold|refer|snapshot|limit",),
        accuse=(r"(memory|RSS|tensors?|live bytes|cache).*(grow|leak)", r"(grow|leak).*(memory|RSS|MiB|tensor|cache)"),
    ),
    Expected(
        name="stepwise_cell",
        script="compute.py",
        cause=(
            r"PlainLSTM|\brecurrent\b.*(small|many|short|tiny|loop|operators|ops|python|launch|step by step)",
            r"(small|tiny|many|short) (op|call|kernel)|(operators?|ops|kernels) per step|dispatch|python loop",
            r"(?<!profiler )overhead-bound|launch-bound",
        ),
        near=(r"(?<!profiler )overhead|python|host-bound|\brecurrent\b|LSTM",),
        fix=(r"nn\.(LSTM|GRU|RNN)|torch\.compile|vectori[sz]|fuse|loop|PlainLSTM|combine",),
        near_fix=(r"\brecurrent\b|batch|fewer|CUDA graph",),
        accuse=(
            r"PlainLSTM|python loop",
            r"(small|tiny|many|short) (op|call|kernel)|dispatch|launch-bound|overhead-bound",
        ),
    ),
    Expected(
        name="cosine_frontend",
        script="compute.py",
        cause=(r"float64|double|64-bit",),
        near=(r"precision|dtype|\bspectrum\b|Spectrum",),
        fix=(r"float32|\.float\(\)|float64|double",),
        near_fix=(r"precision|dtype|\bspectrum\b",),
        accuse=(r"float64|double|64-bit",),
    ),
    Expected(
        name="attached_teacher",
        script="compute.py",
        cause=(
            r"gradients?.*(unused|discard|never used|not used|no optimi[sz]er|thrown|wasted|needless)",
            r"(unused|discarded|wasted|needless) .*gradients?|teacher.*(gradient|backward|graph|frozen|not trained)",
            r"(backward|gradients?).*teacher|no_grad|requires_grad|detach",
        ),
        near=(r"teacher|backward",),
        fix=(r"no_grad|requires_grad|inference_mode|detach|freeze|frozen|\.eval\(\) and",),
        near_fix=(r"teacher|optimi[sz]er|toggle",),
        accuse=(
            r"(unused|wasted|discarded) .*gradients?",
            r"gradients?.*(unused|wasted|discard|not used|never used|no optimi[sz]er)",
            r"no_grad|detach",
        ),
    ),
)
