"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

WAITS: Final = r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader"
GROWS: Final = r"grow|leak|accumulat|\bkeeps? .* (alive|live)|rises|increas"
KEEPS: Final = r"grow|leak|accumulat|\bkeeps?\b|\bkept\b|rises|increas"
# Who keeps the memory, or where it is allocated.
KEEPER: Final = (
    r"epoch_outputs|\boutputs|EpochSummary|Restorer|restored|on_train_batch_end|training_step|keepers\.py:\d"
)
RECORDS: Final = r"\bgraph|grad_fn|entropy|\bpages\b|Notebook|log_metrics|logger|training_step|keepers\.py:\d"
CACHE: Final = r"cach|\bwaves\b|\bencoding\b|Scanner|training_step|keepers\.py:\d"
SMALL: Final = r"(small|tiny|many|short) (op|call|kernel)|(?<!profiler )overhead|host-bound|launch|dispatch|python"
# Who keeps the batches, or where they are made.
LOADER: Final = r"itertools|\bcycle|loader|\bbatches\b|\bunlabeled\b|training_step|collat|\bstack\b|tensors\.py:\d"
COLLECTIVE: Final = r"all.?reduc|collective|synchroni[sz]|communicat|reduction"
DATASET: Final = r"__getitem__|\bdata ?set\b|\bfetch"

INPUT_BOUND: Final = (r"^input-bound", r"data ?loader", r"wait\w* for (the )?(data|batch|input)")
HOOK: Final = (r"^callback-bound", r"^host-bound", r"callback", r"on_before_optimizer_step", r"\blog(s|ger|ging)?\b")
MEMORY_HOLDERS: Final = (r"host memory", r"\bRSS\b", r"resident", r"held in (the )?(main )?process")
HOLDS: Final = r"grow|leak|accumulat|\bkeeps?\b|\bkept\b|rises|increas|\bheld\b|\bholds?\b"
REDUCES: Final = r"(all.?reduc|collective|synchroni[sz]|\bsync|communicat|reduction|averag)\w*"
PASSES: Final = (
    r"(\b(4|four|several|many|multiple) times|more than once|repeated"
    r"|(each|every|per|all|4|four|several|multiple) (of the )?(\w+ )?(backward|part|micro|pass)|backward pass)"
)
ENLARGE: Final = r"(interpolat|up-?sampl|enlarg|bilinear|resiz)\w*"
# Freed memory that the C allocator keeps is no leak.
GROWTH: Final = (
    r"^(?!.*keeps freed).*(memory|RSS|tensors?|live bytes|storage|graph).*(grow|leak)",
    r"^(?!.*keeps freed).*(grow|leak).*(memory|RSS|MiB|tensor|storage|graph)",
)

WAITS_FOR_DATA: Final = (
    r"input-bound",
    r"data-?bound",
    r"wait(s|ed|ing)?\b.*\b(data|batch|loader|input|worker)",
    r"starv",
)
MEMORY_GROWS: Final = (r"\b(grow|leak)", r"(rises?|rising|accumulat|piles? up).*(MiB|GiB|MB|GB|memory|step)")
LATE: Final = (r"rank.*\b(wait|late|slow|behind|straggl|apart|idle)", r"(wait|late|slow|straggl|imbalance).*rank")
WORKERS: Final = r"num_workers|more workers|worker process|\bworkers\b"
ONCE: Final = (
    r"\bonce\b|ahead of|beforehand|before (the )?training|in advance|precomput|pre-?process"
    r"|cach(e|ing)|up front|offline"
)

EXPECTED: Final = (
    Expected(
        name="slow_decode",
        cause=(
            r"(data|input|load|fetch).*(__getitem__|CompressedVectors|dataset|decod|decompress)",
            r"(__getitem__|CompressedVectors|dataset|decod|decompress).*(data|input|load|slow|takes)",
            r"(data|input).*workers? .*(busy|saturated|CPU|keep up|cannot|slow)",
            r"workers? .*(busy|saturated|keep up|too slow).*(data|batch|input)?",
        ),
        near=(r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader",),
        fix=(r"__getitem__|decod|decompress|cach|precomput|preprocess|CompressedVectors|once|offline",),
        near_fix=(r"num_workers|workers|prefetch",),
    ),
    Expected(
        name="no_workers",
        cause=(
            r"num_workers ?= ?0|no (data ?loader )?workers?|without workers|zero workers|main process|worker process",
            r"(data|input|load|fetch).*(__getitem__|StoredVectors|training process|same process)",
        ),
        near=(r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader",),
        fix=(r"num_workers ?= ?[1-9]|num_workers|worker processes",),
        near_fix=(r"prefetch|workers|cach",),
    ),
    Expected(
        name="restarted_workers",
        cause=(
            r"persistent_workers",
            r"workers?.*(start|spawn|fork|creat|restart).*(epoch|again|anew|new)?",
            r"(start|spawn|fork|creat|restart)\w* .*workers?",
        ),
        near=(r"epoch (start|boundar|begin|end)|(first|start|begin\w*|between|each|every|new|end of).{0,20}epoch",),
        fix=(r"persistent_workers",),
        near_fix=(r"longer epochs|fewer epochs|workers",),
        accuse=(r"persistent_workers", r"workers?.*(start|spawn|fork|restart)", r"(start|spawn|restart)\w* .*workers?"),
    ),
    Expected(
        name="padding",
        cause=(r"padd(ed|ing)|pad tokens?|pad values?",),
        near=(r"(constant|same|identical|repeated) (value|token)s?|zeros? .*(batch|input|token)",),
        fix=(r"bucket|sort.*length|pad .*(longest|batch)|longest|dynamic|length|pack|nested|group",),
        near_fix=(r"padd|collate",),
    ),
    Expected(
        name="anomaly_detection",
        cause=(r"anomaly",),
        near=(r"debug",),
        fix=(r"detect_anomaly|anomaly",),
    ),
    Expected(
        name="live_objects",
        cause=(r"garbage|\bGC\b|gc\.|collector pause|cyclic",),
        near=(r"Replay|on_train_batch_end|callback",),
        fix=(r"\bgc\b|freeze|threshold|array|tensor|numpy|fewer objects|Replay",),
        near_fix=(r"callback|on_train_batch_end|objects",),
    ),
    Expected(
        name="metric_each_step",
        cause=(r"metric|auroc|\.compute\b|compute\(\)",),
        near=(r"Ranked\.training_step|outside.*module|training_step.*(itself|self)",),
        fix=(r"metric|auroc|every.*(step|n\b)|less often|epoch|on_epoch|\bcompute\(\)",),
        near_fix=(r"Ranked|training_step",),
    ),
    Expected(
        name="rewriting_logger",
        cause=(r"logger|logging|log_metrics|JsonLogger|metrics\.json",),
        near=(r"\blog\b|file|write|disk|json|callback",),
        fix=(r"log_every_n_steps|append|less often|rewrit|log_metrics|logger",),
        near_fix=(r"\blog|write|file",),
    ),
    Expected(
        name="slow_hook",
        cause=(r"forward hook|histogram|module hook|\bhooks?\b.*(module|forward|block|Residual)",),
        near=(r"\bhooks?\b",),
        fix=(r"hook|histogram",),
        accuse=(r"forward hook|histogram|module hook",),
    ),
    Expected(
        name="frequent_validation",
        cause=(r"validation|validat|val_check",),
        near=(r"evaluation|\beval\b|on_train_batch_end",),
        fix=(r"val_check_interval|check_val_every_n|limit_val_batches|validate less|less often",),
        near_fix=(r"validation",),
    ),
    Expected(
        name="second_profiler",
        cause=(
            r"(another|own|second|other|foreign|user'?s?|already).*profiler|torch\.profiler|profiler .*(active|on|run)",
        ),
        near=(r"profil",),
        fix=(r"(remove|disable|stop|turn off|without|drop|take out|end).*profil|profil.*(remove|disable|off)",),
        near_fix=(r"profil",),
        accuse=(r"(another|own|second|other|foreign|user'?s?) .*profiler|torch\.profiler",),
    ),
    Expected(
        name="looping_optimizer",
        cause=(
            r"optimi[sz]er.*(foreach|fused|loop|small|parameter|tensors|AdamW)",
            r"AdamW|foreach|fused",
        ),
        near=(r"optimi[sz]er",),
        fix=(r"fused ?= ?True|foreach ?= ?True|fused|foreach",),
        near_fix=(r"optimi[sz]er|SGD|fewer parameters|flatten",),
        accuse=(r"optimi[sz]er.*(foreach|fused|loop|small|bound)|foreach",),
    ),
    Expected(
        name="host_growth",
        cause=(
            rf"({GROWS}).*(host|RSS|resident|numpy|python|WeightHistory|callback|on_train_batch_end|process)",
            rf"(host|RSS|resident|numpy|python|WeightHistory|callback|on_train_batch_end).*({GROWS})",
        ),
        near=(GROWS, r"WeightHistory"),
        fix=(r"WeightHistory|on_train_batch_end|\bhistory\b|callback",),
        near_fix=(r"list|append|copy|tracemalloc|objects|snapshot|hold|refer|attribute",),
        accuse=(
            r"(memory|RSS).*(grow|leak|accumulat)",
            r"(grow|leak|accumulat).*(memory|RSS|MiB)",
            r"WeightHistory",
        ),
    ),
    Expected(
        name="validation_outputs",
        cause=(
            r"validat.*(memory|peak|GiB|MiB|kept|output|tensor|grow)",
            r"(memory|peak|grow|kept).*validation",
        ),
        near=(r"validation", r"grow|leak"),
        fix=(r"validation_step|outputs|on_validation_epoch_end|metric|detach|cpu\(\)|clear|append|accumul|aggregat",),
        near_fix=(r"validation|keep|hold",),
        accuse=(r"validation.*(memory|peak|MiB|GiB|grow)", r"(memory|peak|grow).*validation"),
    ),
    Expected(
        name="activations",
        cause=(r"activations?",),
        near=(r"peak memory|memory-bound|memory",),
        fix=(r"checkpoint",),
        near_fix=(r"batch|sequence|bf16|precision|recompute|offload",),
        is_note=True,
        # The twin has activation checkpointing, and a page may say that memory is ample without it.
        accuse=(r"activations? (?!checkpoint).*(most|\d+%|dominat|GiB|MiB)", r"(peak|memory).*activations?"),
    ),
    Expected(
        name="caching_workers",
        cause=(r"workers?.*(grow|leak|accumulat|keep|rise)", r"(grow|leak|accumulat|memory).*workers?"),
        near=(r"memory.*(grow|leak)", r"(grow|leak).*memory"),
        fix=(r"__getitem__|cach|Remembering|data ?set|each worker",),
        near_fix=(r"workers|memory",),
    ),
    Expected(
        name="shared_cores",
        cause=(
            r"(other|foreign) (process|program)|(waits?|waiting).*\bcores?\b",
            r"cores?.*(taken|shared|busy)|CPU contention",
        ),
        near=(r"busy machine|\bload\b|interference",),
        fix=(r"(other|these|those|them).*(end|stop|priority|move|renice|kill)|taskset|renice|quiet|of its own",),
        near_fix=(r"\btop\b|process",),
        # Another program on one of the machine's cores takes less than half of the step, and a page may say so.
        accuse=(r"([5-9]\d|100)% .*\bcores?\b",),
    ),
    Expected(
        name="one_thread",
        cause=(
            r"\b(1|one|single) (\w+ )?thread|single-threaded|(one|1) of (the )?\d+ cores",
            r"cores? (are )?(idle|unused|free)",
        ),
        near=(r"thread|core",),
        fix=(r"set_num_threads|OMP_NUM_THREADS",),
        near_fix=(r"thread",),
        accuse=(r"\b(1|one|single) thread|single-threaded|cores? (are )?(idle|unused)",),
    ),
    Expected(
        name="looped_attention",
        cause=(r"attention|softmax|masked_fill|python loop|(small|many|tiny) (op|kernel|operation)",),
        near=(r"layers?\b|compute-bound|forward",),
        fix=(r"scaled_dot_product_attention|SDPA|flash|fused|FlexAttention",),
        near_fix=(r"attention|torch\.compile|vectori[sz]|loop",),
        accuse=(r"scaled_dot_product|unfused|softmax|masked_fill|python loop|(small|many|tiny) (op|kernel|operation)",),
    ),
    Expected(
        name="attached_generator",
        cause=(
            r"detach",
            r"gradients?.*(unused|discard|never used|not used|thrown|overwritten|zeroed|wasted)",
            r"(unused|discarded|wasted|needless) .*gradients?",
            r"backward.*generator|generator.*(backward|gradient)",
        ),
        near=(r"backward|generator|discriminator|retain_graph",),
        fix=(r"detach|no_grad|toggle_optimizer|requires_grad",),
        near_fix=(r"retain_graph|generator|discriminator",),
        accuse=(r"detach", r"gradients?.*(unused|discard|never used|zeroed|wasted)", r"retain_graph"),
    ),
    Expected(
        name="dominant_module",
        cause=(r"\bmixer\b|Mixer",),
        near=(r"compute-bound|matri(x|ces)|matmul|addmm|mm\b|linear",),
        fix=(r"bf16|precision|mixer|torch\.compile|GPU|accelerator|smaller|width|tensor cores|TF32",),
        near_fix=(r"matmul|module|timeline|profile",),
        accuse=(r"mixer.*(most|dominat)", r"(most|dominat).*mixer"),
    ),
    Expected(
        name="small_batch",
        cause=(
            r"(?<!profiler )overhead|batch size|small(er)? batch|batch of 2",
            r"(small|tiny|short|many) (op|kernel)|dispatch|launch",
        ),
        near=(r"python|host-bound|CPU-bound|framework|throughput",),
        fix=(r"(larger|bigger|increase|raise|grow).{0,30}batch|batch.?size|accumulate",),
        near_fix=(r"torch\.compile|fuse|batch|foreach",),
        accuse=(r"(?<!profiler )overhead|batch size|small(er)? batch|(small|tiny|short|many) (op|kernel)|dispatch",),
    ),
    Expected(
        name="pre_hook",
        cause=(r"forward.?(pre.?)?hook|ConditionProbe\.check|svdvals|module hook",),
        near=(r"\bhooks?\b|ConditionProbe",),
        fix=(r"hook|ConditionProbe|svdvals",),
    ),
    Expected(
        name="gradient_hook",
        cause=(r"(backward|gradient|tensor|parameter|registered) hook|hook.*(gradient|backward)|histogram",),
        near=(r"\bhooks?\b",),
        fix=(r"hook|histogram",),
    ),
    Expected(
        name="slow_sampler",
        cause=(r"sampler|Weighted",),
        near=(r"input-bound|waits? for (data|batch)|data (wait|load)",),
        fix=(r"sampler|Weighted|multinomial|indices|draw",),
        near_fix=(r"workers",),
        accuse=(r"sampler|Weighted",),
    ),
    Expected(
        name="padded_series",
        cause=(r"padd(ed|ing)|pad values?",),
        near=(r"zeros? .*(batch|input|position)",),
        fix=(r"bucket|sort.*length|length|longest|pack|nested|group",),
        near_fix=(r"padd|collate",),
    ),
    Expected(
        name="graph_to_the_maker",
        cause=(
            r"detach",
            r"gradients?.*(unused|discard|never used|not used|thrown|overwritten|zeroed|wasted)",
            r"(unused|discarded|wasted|needless) .*gradients?|unused gradients?",
        ),
        near=(r"backward|maker|critic",),
        fix=(r"detach|no_grad|toggle_optimizer|requires_grad",),
        near_fix=(r"maker|critic",),
        accuse=(r"detach", r"gradients?.*(unused|discard|not used|wasted)", r"(unused|wasted) gradients?"),
    ),
    Expected(
        name="unfrozen_body",
        cause=(
            r"gradients?.*(unused|discard|never used|not used|no optimi[sz]er|in vain)",
            r"(unused|discarded|wasted|needless) gradients?",
            r"\bbody\b.*(no optimi[sz]er|frozen|freeze|requires_grad)",
        ),
        near=(r"\bbody\b|backward",),
        fix=(r"requires_grad|freeze|frozen|no_grad|detach|inference_mode",),
        near_fix=(r"\bbody\b",),
        accuse=(r"(unused|wasted) gradients?", r"no optimi[sz]er"),
    ),
    Expected(
        name="chatty_log",
        cause=(r"\blogging\b|self\.log|\.log\b|\blogs?\b",),
        near=(r"python|training_step",),
        fix=(r"\blog\b|self\.log|log_dict|log less|logging",),
        near_fix=(r"training_step",),
        accuse=(r"\blogging\b|self\.log",),
    ),
    Expected(
        name="single_rows",
        cause=(r"(?<!profiler )overhead|batch size|small(er)? batch|batch of (1|one)",),
        near=(r"python|host-bound|framework|throughput|short|launch|dispatch",),
        fix=(r"(larger|bigger|increase|raise).{0,30}batch|batch.?size|accumulate",),
        near_fix=(r"torch\.compile|fuse|batch",),
        accuse=(r"(?<!profiler )overhead|batch size|small(er)? batch",),
    ),
    Expected(
        name="clip_each",
        cause=(r"clip|on_before_optimizer_step|gradient norm",),
        near=(r"\bhook\b|(small|many|tiny) (op|kernel|operation)|python loop|optimi[sz]er",),
        fix=(r"clip|on_before_optimizer_step|gradient_clip_val|foreach",),
        near_fix=(r"\bhook\b|loop|fuse",),
        # One call for all of 600 tensors has its cost, too.
        accuse=(r"(clip|on_before_optimizer_step).* ([2-9]\d|100)%",),
    ),
    Expected(
        name="double_backward",
        cause=(r"create_graph|double.?backward|second (derivative|order)|(gradient )?penalty|autograd\.grad",),
        near=(r"backward",),
        fix=(r"every \w+ (step|batch)|less often|penalty|create_graph",),
        near_fix=(r"backward|graph",),
        accuse=(r"create_graph|double.?backward|second (derivative|order)",),
    ),
    Expected(
        name="slow_collate",
        cause=(r"collat|\bassemble\b",),
        near=(WAITS,),
        fix=(r"collat|assemble|stack|vectori[sz]",),
        near_fix=(r"num_workers|workers|dataset|batch",),
    ),
    Expected(
        name="many_workers",
        cause=(
            r"(too many|16|num_workers|more).*workers?.*(core|CPU|compet|contend|than)?",
            r"workers?.*(core|CPU|compet|contend|oversubscri)",
            r"oversubscri",
        ),
        near=(r"CPU|context switch|contention|memory of .*worker|workers", WAITS),
        fix=(r"num_workers|fewer (workers|processes)|lower.*workers|reduce.*workers",),
        near_fix=(r"workers|set_num_threads|prefetch",),
        accuse=(r"too many|oversubscri|compet|contend|more .*workers? than",),
    ),
    Expected(
        name="slow_shard",
        cause=(
            r"every \d+(st|nd|rd|th)? (step|batch)|each \d+(st|nd|rd|th)|period|\d+ steps apart",
            r"shard|open_shard",
        ),
        near=(WAITS, r"slow steps?|times as long|stall|spike"),
        fix=(r"shard|prefetch|num_workers|__iter__|read ahead|cach|open\b|in advance|background",),
        near_fix=(r"dataset|data|workers|batches of these",),
    ),
    Expected(
        name="many_threads",
        cause=(r"threads?.*(core|CPU|oversubscri|more|32)|oversubscri|set_num_threads|32 threads",),
        near=(r"threads?|context switch|contention",),
        fix=(r"OMP_NUM_THREADS|set_num_threads|num_threads",),
        near_fix=(r"threads?",),
        # Other programs on the machine may take the cores: that is no word about the training's threads.
        accuse=(r"oversubscri|set_num_threads|\d+ threads",),
    ),
    Expected(
        name="forced_collection",
        cause=(r"garbage|\bGC\b|gc\.collect",),
        near=(r"on_train_batch_end|Collecting",),
        fix=(r"gc\.collect|remove.*collect|\bgc\b|garbage",),
        near_fix=(r"on_train_batch_end|hook|Collecting",),
    ),
    Expected(
        name="scalar_loop",
        cause=(r"\.item\(|_local_scalar_dense|scalar|element by element|is_invalid|isfinite|tolist",),
        near=(r"Checked|training_step|synchroni[sz]|python",),
        fix=(r"\.item|is_invalid|isfinite|vectori[sz]|tensor (op|comparison)|sum\(\)|_local_scalar|scalar",),
        near_fix=(r"training_step|python|Checked|loop",),
        accuse=(r"\.item\(|_local_scalar_dense|scalar|python|synchroni[sz]",),
    ),
    Expected(
        name="log_volume",
        cause=(r"self\.log|log_dict|logg|\.log\b|\blog (call|value|metric)",),
        near=(r"Verbose|training_step|python|many metrics|connector",),
        fix=(r"log_dict|fewer|log less|less often|on_epoch|self\.log|log_every|\.log\b|logg",),
        near_fix=(r"training_step|python|metric",),
        accuse=(r"self\.log|log_dict|logg|\.log\b|\blog (call|value|metric)",),
    ),
    Expected(
        name="slow_callback",
        cause=(r"Heartbeat",),
        near=(r"callback|on_train_batch_end",),
        fix=(r"Heartbeat",),
        near_fix=(r"callback|on_train_batch_end",),
    ),
    Expected(
        name="copied_average",
        cause=(r"deepcopy|AverageWeights",),
        near=(r"callback|on_train_batch_end",),
        fix=(r"deepcopy|AverageWeights|in.place|lerp",),
        near_fix=(r"callback|on_train_batch_end|less often",),
    ),
    Expected(
        name="frequent_checkpoints",
        cause=(r"checkpoint",),
        near=(r"callback|on_train_batch_end|\bsav(e|ing)\b|writ",),
        fix=(r"every_n_train_steps|less often|every_n|ModelCheckpoint|async|train_time_interval|save_weights_only",),
        near_fix=(r"checkpoint|callback",),
        accuse=(r"checkpoint.*(%|often|each|every|takes)|callback",),
    ),
    Expected(
        name="tiny_operators",
        cause=(
            r"(tiny|small|short|many) (op|call|kernel)|(operators?|ops|kernels|calls) per step|dispatch|python loop",
            r"(?<!profiler )overhead|launch-bound|one_by_one|(thousands|\d{4,}|\d+[ .]?k) (of )?(operators|ops|calls)",
        ),
        near=(r"python|host-bound|CPU-bound|Smoothed|select|stack",),
        fix=(r"torch\.compile|vectori[sz]|fuse|fewer|loop|one_by_one|combine",),
        near_fix=(r"Smoothed|batch|forward|timeline",),
    ),
    Expected(
        name="dense_embedding",
        cause=(
            r"optimi[sz]er.*(embedding|dense|adam|items|table)|(adam|items|embedding|table).*optimi[sz]er",
            r"embedding.*(dense|gradient)|sparse|\bAdam\b",
        ),
        near=(r"optimi[sz]er|embedding",),
        fix=(r"sparse",),
        near_fix=(r"fused|foreach|optimi[sz]er|embedding",),
        # SparseAdam has state for each row as well: only time is the fault's.
        accuse=(r"optimi[sz]er-bound|optimi[sz]er.*of each step|dense|sparse",),
    ),
    Expected(
        name="tensor_leak",
        cause=(
            rf"({GROWS}).*(tensor|graph|results|logits|training_step|grad_fn|Recorded|live bytes|allocat)",
            rf"(tensor|graph|results|logits|training_step|grad_fn|Recorded|live bytes|allocat).*({GROWS})",
        ),
        near=(GROWS,),
        fix=(r"detach|\.item\(|float\(|results|graph|append",),
        near_fix=(r"tensor|hold|refer|snapshot|list|objects",),
        accuse=(
            r"(memory|RSS|tensor|live bytes).*(grow|leak)",
            r"(grow|leak).*(memory|RSS|MiB|tensor)",
        ),
    ),
    Expected(
        name="worker_cache",
        cause=(rf"workers?.*({GROWS})", rf"({GROWS}).*worker", r"cach(e|ed|ing)\b.*(worker|dataset|grow)"),
        near=(GROWS, r"memory of .*process|child processes|worker"),
        fix=(r"cach|dataset|__getitem__|persistent_workers|limit",),
        near_fix=(r"worker|memory",),
        accuse=(r"worker.*(grow|leak|memory|RSS)", r"(grow|leak).*(memory|RSS|MiB|worker)|(memory|RSS).*(grow|leak)"),
    ),
    Expected(
        name="optimizer_state",
        cause=(
            r"optimi[sz]er state|Adam.*(state|memory)|optimi[sz]er.*(memory|peak|GiB|MiB)|(memory|peak).*optimi[sz]er",
        ),
        near=(r"optimi[sz]er|memory",),
        fix=(r"8-?bit|SGD|Adafactor|shard|ZeRO|FSDP|bf16|low.?rank|LoRA|Muon|Lion|factored|optimizer with less state",),
        near_fix=(r"optimi[sz]er|memory",),
        accuse=(r"optimi[sz]er state",),
        is_note=True,
    ),
    Expected(
        name="retained_graph",
        cause=(
            r"retain_graph|retained|(previous|earlier|last|old)( step)?.*(graph|activation)",
            r"graph.*(kept|alive|retain|held)",
            r"(activations|graph).*(after|outlive|next step|still|previous|survive)",
        ),
        near=(r"activations?|graph",),
        fix=(r"retain_graph|detach|\.item\(|float\(|\bprevious\b",),
        near_fix=(r"graph|checkpoint|attribute|refer|hold",),
        accuse=(r"retain|(previous|earlier|last) step.*(graph|activation)|outlive|after (the )?backward",),
    ),
    Expected(
        name="double_precision",
        cause=(r"float64|double|64-bit",),
        near=(r"precision|dtype|compute-bound",),
        fix=(r"float32|\.float\(\)|32-true|float64|double",),
        near_fix=(r"precision|bf16|dtype",),
        accuse=(r"float64|double|64-bit",),
    ),
    Expected(
        name="memory_format",
        cause=(r"channels.last|memory.format|NCHW|conv\w*.*(layout|format)|convolution",),
        near=(r"compute-bound|layout|reorder|copy|conv",),
        fix=(r"channels.last",),
        near_fix=(r"memory.format|bf16|conv|layout",),
        accuse=(r"channels.last|memory.format|NCHW|layout|reorder",),
    ),
    Expected(
        name="raw_texts",
        cause=(r"collat|\btogether\b|tokeni[sz]|Vocabulary|\bencod(e|es|ing)\b",),
        near=(WAITS,),
        fix=(r"collat|\btogether\b|tokeni[sz]|Vocabulary|\bencod(e|es|ing)\b|preprocess|once|offline|in advance",),
        near_fix=(r"workers",),
    ),
    Expected(
        name="scattered_files",
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
        cause=(r"configure_gradient_clipping|quantile|\bsort", r"(gradient )?clipping.*(takes|\d+%|costs|slow)"),
        near=(r"clip|optimi[sz]er|\bhooks?\b",),
        fix=(r"configure_gradient_clipping|quantile|\bsort|clip_grad_norm|gradient_clip_val|by norm|kthvalue",),
        near_fix=(r"clip|less often|foreach",),
        accuse=(r"configure_gradient_clipping|quantile|\bsort", r"clip\w* .*([2-9]\d|100)%"),
    ),
    Expected(
        name="short_epochs",
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
        cause=(r"anomaly",),
        near=(r"(?<!profiler )overhead|debug|traceback|format_stack|isnan|host-bound|python",),
        fix=(r"anomaly",),
        near_fix=(r"debug|guarded",),
        accuse=(r"anomaly",),
    ),
    Expected(
        name="eager_messages",
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
        cause=(
            rf"({KEEPS}).*({KEEPER})",
            rf"({KEEPER}).*({KEEPS})",
        ),
        near=(KEEPS,),
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
        cause=(
            rf"({KEEPS}).*({RECORDS})",
            rf"({RECORDS}).*({KEEPS})",
        ),
        near=(KEEPS, r"\bgraph\b"),
        fix=(r"detach|\.item\(|float\(|Notebook|log_metrics|graph",),
        near_fix=(r"tensor|hold|refer|snapshot|list|logger|append",),
        accuse=(r"(memory|RSS|tensors?|live bytes|graph).*(grow|leak)", r"(grow|leak).*(memory|RSS|MiB|tensor|graph)"),
    ),
    Expected(
        name="memoized_tables",
        cause=(
            rf"({KEEPS}).*({CACHE})",
            rf"({CACHE}).*({KEEPS})",
            r"lru_cache",
        ),
        near=(KEEPS,),
        fix=(r"cach|maxsize|\bwaves\b|memoi[sz]|\bencoding\b",),
        near_fix=(r"tensor|hold|refer|snapshot|limit",),
        accuse=(r"(memory|RSS|tensors?|live bytes|cache).*(grow|leak)", r"(grow|leak).*(memory|RSS|MiB|tensor|cache)"),
    ),
    Expected(
        name="stepwise_cell",
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
        cause=(r"float64|double|64-bit",),
        near=(r"precision|dtype|\bspectrum\b|Spectrum",),
        fix=(r"float32|\.float\(\)|float64|double",),
        near_fix=(r"precision|dtype|\bspectrum\b",),
        accuse=(r"float64|double|64-bit",),
    ),
    Expected(
        name="attached_teacher",
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
    Expected(
        name="scanned_histories",
        cause=(
            r"__getitem__|NextPurchase|\bhistory\b|Purchases",
            r"linear (search|scan)|\bscan(s|ned|ning)?\b|boolean mask|compar\w+ .*(log|array|rows|users)",
        ),
        near=(WAITS,),
        fix=(
            r"__getitem__|NextPurchase|\bhistory\b|Purchases|\bindex(ed|es|ing)?\b|\bgroup|\bsort|look.?up|\bdict",
            r"precomput|preprocess|cach|in advance|\bonce\b",
        ),
        near_fix=(r"workers|prefetch",),
        # Samples of the healthy twin are made in the main process, too.
        accuse=(
            r"\bhistory\b|Purchases|linear (search|scan)|boolean mask",
            r"(__getitem__|NextPurchase).* ([4-9]\d|100)%",
        ),
    ),
    Expected(
        name="single_rows_of_table",
        cause=(
            r"(one by one|row by row|sample by sample|item by item|one at a time)",
            r"(single|individual|each|per|every|separate)[ -](row|sample|item|element|index)",
            r"collat|__getitem__|TensorDataset|\bfetch(es|ing)?\b .*(sample|row)|\bstack",
        ),
        near=(WAITS,),
        fix=(
            r"BatchSampler|batch_size ?= ?None|__getitems__|(whole|entire) batch|at once|vectori[sz]",
            r"(slic|index|gather)\w* .*batch|batch of ind|collat|TensorDataset|__getitem__",
        ),
        near_fix=(r"workers|prefetch",),
        accuse=(
            r"one by one|row by row|sample by sample|one at a time|collat",
            r"(__getitem__|TensorDataset|data ?loader|waits? for data).* ([4-9]\d|100)%",
        ),
    ),
    Expected(
        name="nested_targets",
        cause=(
            r"batch_to_device|move_data_to_device|apply_to_collection|\bnested\b",
            r"(batch|data|input|target)s?'? .*(transfer|moved? to|to the device)|transfer .*(batch|data|device)",
            r"(lists?|floats|numbers|python objects) .*(batch|targets?)\b",
            r"(batch|targets?) .*(lists|floats|numbers|objects)",
        ),
        near=(r"python|host-bound|transfer|strategy|between (the )?(load|data)", r"hook"),
        fix=(
            r"batch_to_device|move_data_to_device|apply_to_collection|\bnested\b|scenes_together|\btargets\b",
            r"(as|to|into|in|with|use|of|make|return) (a |one |few |larger |fewer |flat )*(tensor|array)s?",
            r"tensors? instead",
            r"collat|transfer_batch_to_device",
        ),
        near_fix=(r"annotation|data ?set|Scenes|transfer|python",),
        accuse=(
            r"batch_to_device|move_data_to_device|apply_to_collection|\bnested\b",
            r"transfer.* ([2-9]\d|100)%|([2-9]\d|100)%.* transfer",
        ),
    ),
    Expected(
        name="reread_station",
        cause=(
            r"train_dataloader|reload_dataloaders|Weather|station|\bpars(e|es|ed|ing)\b",
            r"data ?(loader|set|module)s?\b.*(again|anew|rebuil|reload|re-?creat|re-?mad|(each|every|per|new) epoch)",
            r"(rebuil|reload|re-?creat|re-?mak|re-?read|make|creat)\w* .*(data ?(loader|set|module)|file)",
        ),
        near=(r"epoch (start|boundar|begin|end)|(start|begin\w*|between|each|every|new|end of).{0,20}epoch", WAITS),
        fix=(
            r"reload_dataloaders|train_dataloader|Weather|station|\bpars(e|ed|ing)\b",
            r"\bsetup\b|prepare_data|\bonce\b|cach|(keep|reuse|hold) .*(data|loader|rows|tensor)",
        ),
        near_fix=(r"longer epochs|fewer epochs|data ?module|data ?set",),
        accuse=(r"reload_dataloaders|train_dataloader|\bpars(e|es|ing)\b|rebuil|re-?read",),
    ),
    Expected(
        name="busy_watch",
        cause=(
            r"\bGIL\b|interpreter lock|memory-watch|smaps|\bmappings\b|\bWatch\b|Watch\.|\.watch\b",
            r"(background|another|daemon|python|watch\w*|second|user|own) threads?\b",
            r"\bthreads?\b .*(of|by|from|in) .*(callback|host\.py|script|program's own)",
        ),
        near=(r"\bthreads?\b.*(contend|compet|contention|busy)|contention|\bcallback",),
        fix=(
            r"\bGIL\b|memory-watch|smaps|\bmappings\b|\bWatch\b|Watch\.|\.watch\b",
            r"(background|python|this|that|its|daemon|the|another) thread\b",
            r"\bpoll|(sleep|pause|wait)\w* (longer|more)|longer (sleep|pause|interval)|separate process",
        ),
        near_fix=(r"\bthreads?\b|callback|less often",),
        accuse=(r"\bGIL\b|memory-watch|smaps|\bmappings\b|\bWatch\b|(background|another|daemon|python) threads?\b",),
    ),
    Expected(
        name="views_one_by_one",
        cause=(
            r"on_after_batch_transfer|\baugment|RandomView|random_view|grid_sample|affine_grid|grid_sampler",
            r"image by image|one by one|(per|each|single|every)[ -](image|sample)|one (image|sample) at a time",
        ),
        near=(SMALL, r"\bhooks?\b"),
        fix=(
            r"on_after_batch_transfer|\baugment|RandomView|random_view|grid_sample|affine_grid",
            r"(whole|entire) batch|at once|batched|vectori[sz]|\bloop",
        ),
        near_fix=(r"\bhooks?\b|torch\.compile|fewer|larger|workers|data ?set",),
        # The healthy twin augments as well, in a tenth of its step.
        accuse=(
            r"image by image|one by one|one (image|sample) at a time|(small|tiny|many|short) (op|call|kernel)",
            r"takes ([3-9]\d|100)%.*(on_after_batch_transfer|augment\w*|RandomView|grid_sample\w*)",
        ),
    ),
    Expected(
        name="group_per_parameter",
        cause=(
            r"param(eter)?[ _-]?groups?|optimi[sz]er.*\bgroups?\b|\bgroups?\b.*(optimi[sz]er|parameters?|tensors?)",
            r"\b240 (groups|calls|updates|fused)",
        ),
        near=(r"optimi[sz]er|AdamW|scheduler|CosineAnnealing",),
        fix=(r"\bgroups?\b|param_groups|parameter_groups|\bmerge",),
        near_fix=(r"optimi[sz]er|scheduler|fused|foreach|fewer (param|tensor)",),
        accuse=(r"param(eter)?[ _-]?groups?|\b\d+ groups", r"optimi[sz]er.* ([4-9]\d|100)%"),
    ),
    Expected(
        name="compiled_per_length",
        cause=(
            r"re-?compil|dynamo",
            r"compil\w+ .*(again|anew|shape|length|each|every|steps|repeated|\d+ times|%)|(time|s) .*compiling",
        ),
        near=(r"compil|(shape|length)s? (change|var|differ)|(new|different|varying) (shape|length)",),
        fix=(
            r"\bdynamic\b|mark_dynamic|\bbucket|re-?compil",
            r"(fixed|same|few|constant|fewer|common) (\w+ )?(shape|length|size)s?|pad .*(length|multiple|shape|size)",
        ),
        near_fix=(r"compil|\bpad|length|shape",),
        # The healthy twin compiles as well, once or twice.
        accuse=(r"re-?compil", r"compil\w+ .*(each|every|again)"),
    ),
    Expected(
        name="needless_checkpointing",
        cause=(
            r"re-?comput|(activation|gradient|torch\.utils)[ .]?checkpoint",
            r"checkpoint(ing|ed|s)? .*(layer|module|backward|forward)",
            r"CheckpointFunction|forward.*(again|twice|second time|once more|2 times|two times)",
        ),
        near=(r"checkpoint|backward",),
        fix=(
            r"(remove|without|disable|turn(ing)? off|switch(ing)? off) .*(checkpoint|re-?comput)",
            r"(drop|fewer|stop|skip|\bno|avoid) .*(checkpoint|re-?comput)",
            r"checkpoint\w* .*(\boff\b|remov|disabl|False|fewer|only|every (second|other))|gradient_checkpointing",
            r"(keep|store|save) .*activations|memory .*(free|enough|spare|left|room)",
        ),
        near_fix=(r"checkpoint|re-?comput",),
        # To propose checkpointing is not to find it.
        accuse=(
            r"CheckpointFunction|re-?comput\w* .*(takes|costs|\bof (the|each|a) step)",
            r"checkpointing (takes|costs)|forward.*(twice|second time|once more)",
        ),
    ),
    Expected(
        name="weight_made_each_time",
        cause=(
            r"parametri[sz]|orthogonal(?!RNN)|\bcayley\b|linalg|_solve|\blu_|triangular|\bturn\b",
            r"weights? .*(made|computed|built|evaluated|derived) .*(again|each|every|times)",
        ),
        near=(SMALL, r"OrthogonalRNN|\brnn\b|time steps?|\bloop"),
        fix=(
            r"parametri[sz]|\bcached\b|orthogonal(?!RNN)|\bturn\b|make_once|\bcayley\b|linalg|_solve",
            r"once (per|for|a|before)|out of the loop|outside (of )?the loop|hoist|reuse .*weight",
        ),
        near_fix=(r"OrthogonalRNN|\brnn\b|\bloop|torch\.compile|fuse",),
        accuse=(
            r"(parametri[sz]\w*|orthogonal\w*|cayley|linalg\w*|\bsolve\w*|\blu_\w*|\bturn\b).* ([3-9]\d|100)%",
            r"([3-9]\d|100)% .*(parametri[sz]|cayley|linalg|\bsolve)",
        ),
    ),
    Expected(
        name="second_forward",
        cause=(
            r"RunningAccuracy|own_scores",
            r"forward.*(twice|again|second time|two times|2 times|once more|callback|on_train_batch_end)",
            r"(second|two|2|another|additional|extra) forward|(twice|again) .*forward",
            r"(callback|on_train_batch_end)\b.*(forward|network|model\b|module\b|\d+%)",
        ),
        near=(r"callback|on_train_batch_end|\bhooks?\b",),
        fix=(
            r"RunningAccuracy|own_scores|on_train_batch_end|reuse|second forward|forward again",
            r"(scores|logits|predictions|results?|outputs?) (of|from|in|that) .*step|\boutputs\b",
        ),
        near_fix=(r"callback|less often|every (n|\d+)|\bhook",),
        accuse=(
            r"forward.*(twice|again|second time|once more)",
            r"(RunningAccuracy|callback|on_train_batch_end).* ([2-9]\d|100)%",
        ),
    ),
    Expected(
        name="cycled_loader",
        cause=(
            rf"({KEEPS}).*({LOADER})",
            rf"({LOADER}).*({KEEPS})",
            r"itertools|\bcycle\b",
        ),
        near=(KEEPS,),
        fix=(
            r"itertools|\bcycle\b|\bunlabeled\b|again_and_again|new iterator|\biter\(|generator",
            r"(start|restart|re-?creat)\w* .*(loader|iterator)|batches? .*(kept|keep|held|hold|cach|saved|refer)",
        ),
        near_fix=(r"tensor|hold|refer|snapshot|\blist\b|append|objects|collat|attribute|data ?loader|iterator",),
        accuse=(
            r"(memory|RSS|tensors?|live bytes|batches).*(grow|leak)",
            r"(grow|leak).*(memory|RSS|MiB|tensor|batches)",
        ),
    ),
    Expected(
        name="mask_per_layer",
        cause=(
            r"\bbuffers?\b|\bmasks?\b|MaskedAttention|attentions?\.\d\S*bias|register_buffer|tril",
            r"3072",
        ),
        near=(r"(memory|peak|RSS).*(model|module|parameters|weights|layers|before)",),
        fix=(
            r"\bbuffers?\b|\bmasks?\b|MaskedAttention|is_causal|register_buffer|3072|\blongest\b",
            r"(max(imum|imal)?|longest) (sequence )?(length|positions)",
        ),
        near_fix=(r"attention|parameters|share|smaller|memory",),
        is_note=True,
        accuse=(
            r"(\bbuffers?\b|\bmasks?\b|MaskedAttention).*\b(\d{3,}(\.\d+)?|[1-9]\d(\.\d+)?) ?MiB",
            r"(\bbuffers?\b|\bmasks?\b|MaskedAttention).*GiB|3072",
        ),
    ),
    Expected(
        name="broadcast_distances",
        cause=(
            r"\bdistances\b|broadcast|pairwise|all pairs|\bdifferences\b|\bpow\b|pow_|PowBackward",
            r"(large|big|huge|temporary|intermediate|materiali[sz]ed) (\w+ )?(tensors?|results?|allocations?)",
        ),
        near=(r"element-?wise|memory-bound|memory bandwidth|temporar|activations?|allocat", r"\b(sub|sum|mul)\b"),
        fix=(r"cdist|matmul|matrix product|\bdistances\b|broadcast|pairwise|\bchunk|in parts|block by block",),
        near_fix=(r"\bfuse|torch\.compile|element-?wise|temporar|training_step|checkpoint|smaller batch",),
        accuse=(
            r"broadcast|all pairs|\bpow\b|element-?wise",
            r"(large|big|huge|temporary|intermediate) (\w+ )?(tensors?|results?|allocations?)",
        ),
    ),
    Expected(
        name="synced_values",
        cause=(
            r"sync_dist",
            rf"({COLLECTIVE}).*(\blog|metric|\bvalues?\b|scalar|small|tiny|many|single numbers)",
            rf"(\blog|metric|\bvalues?\b|scalar|small|tiny|many).*({COLLECTIVE}|\branks\b)",
        ),
        near=(COLLECTIVE, r"\branks?\b|\bgloo\b|self\.log|\blogging\b"),
        fix=(
            r"sync_dist|self\.log|log_dict|on_epoch|logged|metrics?\b",
            r"\blog(s|ging)? .*(fewer|rank|once|together|epoch)",
            rf"(one|single|fewer) (\w+ )?({COLLECTIVE}|tensor)|\bstack",
        ),
        near_fix=(rf"{COLLECTIVE}|bucket|no_sync|accumulate|less often|\blog",),
        accuse=(
            r"sync_dist",
            rf"({COLLECTIVE}).*(\blog|metric|scalar|small|tiny|many)",
            rf"(\blog|metric|scalar|small|tiny|many)\w* .*({COLLECTIVE})",
        ),
    ),
    Expected(
        name="uneven_ranks",
        cause=(
            r"straggl|imbalanc|uneven|unequal|unbalanced",
            r"slow(er|est)? (rank|process)|rank .*(slower|slowest|late\b|behind)",
            r"(wait|idle|block)\w* .*(\branks?\b|other process\b)",
            r"\branks?\b.*(wait|idle|longer|more (work|tokens|data)|different|differ)",
        ),
        near=(COLLECTIVE, r"\branks?\b|\bgloo\b|barrier"),
        fix=(
            r"balanc|\beven(ly)?\b|equal(ly)?|same (amount|length|number|work|size)|interleav|take turns|\bshare\b",
            r"straggl|slow(er|est)? (rank|process)|(longer|shorter|length).*(rank|batch|text|sample)",
            r"Corpus|sampler|\bbucket(s|ing)?\b(?!_cap)|shard",
        ),
        near_fix=(r"\branks?\b|data|bucket_cap|no_sync|accumulate",),
        # Both ranks of the healthy twin wait now and then for each other, more so on a busy machine.
        accuse=(
            r"straggl|imbalanc|uneven|unequal|unbalanced",
            r"\branks?\b.*(wait|idle|slower).* ([4-9]\d|100)%|([4-9]\d|100)%.*(wait|idle)\w* .*\branks?\b",
        ),
    ),
    Expected(
        name="permuting_replay",
        cause=(
            r"ReplayMemory",
            r"\bdraw\b",
            r"(random\.)?choice",
            r"permut",
            r"replay",
            r"shuffl\w+ (all|the whole|every|a million)",
        ),
        near=(*INPUT_BOUND, r"Experience", r"IterableDataset", r"sampl(er|ing)"),
        fix=(
            r"default_rng",
            r"Generator\.choice",
            r"replace ?= ?True",
            r"(rng|generator|np\.random|torch)\.?(integers|randint)",
            r"\b(integers|randint)\b",
            r"without (permuting|shuffling)",
            r"draw (only|just|the)",
            r"(cheaper|make|speed).*\b(draw|choice|ReplayMemory|Experience)\b",
            r"\b(draw|choice|ReplayMemory)\b.*(cheaper|faster|once|ahead|vector)",
        ),
        near_fix=(r"num_workers", r"worker", r"\bdraw\b", r"\bchoice\b", r"Experience", r"prefetch", r"permut"),
    ),
    Expected(
        name="blur_before_crop",
        cause=(
            r"\baugmented\b",
            r"GaussianBlur",
            r"\bblur",
            r"ImageFilter",
            r"ImageEnhance",
            r"\b(PIL|Pillow)\b",
            r"\bfilter\b",
            r"augmentation",
            r"image (transform|operation|filter)",
            r"whole (image|slide)",
            r"larger than (the )?(sample|crop)",
        ),
        near=(*INPUT_BOUND, r"Slides", r"__getitem__", r"worker", r"transform"),
        fix=(
            r"\bcrop",
            r"(resize|shrink|downscale|smaller|cut)\b.*(first|before|earlier)",
            r"(first|before|earlier)\b.*(resize|shrink|downscale|smaller|cut)",
            r"only (on |to )?(the )?(part|pixels|region)",
            r"(less|fewer|cheaper|faster|batch|once|move|precompute|cache)\b.*(augmented|blur|filter|augmentation)",
            r"(augmented|blur|filter|augmentation)\b.*(less|fewer|cheaper|faster|batch|once|precompute|cache|smaller)",
        ),
        near_fix=(
            r"num_workers",
            r"more workers",
            r"augmented",
            r"\bblur",
            r"__getitem__",
            r"transform",
            r"precompute",
            r"cache",
        ),
        accuse=(
            r"\baugmented\b",
            r"GaussianBlur",
            r"\bblur",
            r"ImageFilter",
            r"\bPillow\b",
            r"whole (image|slide)",
            r"^input-bound",
        ),
    ),
    Expected(
        name="fresh_iterator",
        cause=(
            r"iter\((the |self\.)?\w*loader",
            r"next\(iter\(",
            r"new iterator",
            r"iterators? (is|are|was|were)?\s*(made|created|started|built)",
            (
                r"(makes?|creates?|starts?|builds?|restarts?|recreates?) (a |an |its |the )?(new |fresh |another )?"
                r"(data ?loader('s)? )?iterator"
            ),
            r"(loader|iterator)\w*\b.*(each|every|per) (step|batch)",
            r"shuffl\w+\b.*(each|every|per) (step|batch)",
            r"RandomSampler",
            r"randperm",
            r"Consistency\.more",
            r"\bmore\(\)",
            r"second (data ?)?loader",
        ),
        near=(
            r"sampler",
            r"data ?loader",
            r"\bmore\b.*pipelines",
            r"training_step",
            r"^host-bound",
            r"^input-bound",
        ),
        fix=(
            r"(keep|reuse|hold|store|create|make)\b.*\biterator",
            r"iterator\b.*(once|keep|kept|reuse|outside)",
            r"next\(iter\(",
            r"CombinedLoader",
            r"(pass|give|return)\b.*(loader|both).*(train_dataloader|fit|trainer)",
            r"iter\(.*once",
            r"replacement ?= ?True",
        ),
        near_fix=(r"iterator", r"\bmore\b", r"loader", r"sampler", r"randperm", r"shuffle"),
        accuse=(r"iterator", r"RandomSampler", r"randperm", r"\bmore\(\)", r"Consistency\.more", r"second loader"),
    ),
    Expected(
        name="rebuilt_windows",
        cause=(
            r"train_dataloader",
            r"reload_dataloaders_every_n_epochs",
            r"reload\w*",
            r"Windows(\.__init__|\(| (is|are) (re)?(built|made))",
            r"(data ?set|loader|windows)\b.*(re)?(built|made|created)\b.*(each|every|per|between) epochs?",
            r"(re)?(build|make|create)\w*\b.*(data ?set|loader)\b.*(each|every|per|between) epochs?",
            r"DataModule hook",
        ),
        near=(
            r"(between|start of|change of|turn of|each|every) (the |an |each )?epochs?",
            r"Windows",
            r"Demand\b",
            r"^input-bound",
            r"DataModule",
            r"epoch (start|boundar|change|overhead)",
        ),
        fix=(
            r"\bsetup\b",
            r"reload_dataloaders_every_n_epochs",
            r"\bonce\b",
            r"(keep|reuse|cache|store)\b.*(data ?set|windows|loader)",
            r"outside (of )?train_dataloader",
            r"out of train_dataloader",
            r"prepare_data",
        ),
        near_fix=(r"train_dataloader", r"Windows", r"longer epochs", r"fewer epochs", r"reload", r"vectori[sz]e"),
        accuse=(r"train_dataloader", r"reload", r"Windows\.__init__", r"Demand\b"),
    ),
    Expected(
        name="piling_hooks",
        cause=(
            r"forward hooks?",
            r"hooks?\b.*(grow|pile|accumulat|never removed|not removed|more (and more|each|every))",
            r"(grow|more|number|count)\w*\b.*\bhooks?\b",
            r"register_forward_hook",
            r"DeadUnits\.watch",
            r"watch\.<locals>\.hook",
            r"\bhook\b.*pipelines",
            r"pipelines\S*.*\bhook\b",
        ),
        near=(
            r"DeadUnits",
            r"steps? (get|become|grow|take)\w*\b.*(slow|long)",
            r"(slow|long)er (with|over|each|every)",
            r"grow\w* (over|with|from|during)",
            r"\btrend\b",
            r"\bhooks?\b",
            r"^callback-bound",
        ),
        fix=(
            r"remov\w+\b.*\b(hooks?|handles?)",
            r"\b(hooks?|handles?)\b.*\bremov",
            r"\.remove\(\)",
            r"regist\w+\b.*\bonce",
            r"\bonce\b.*regist\w+",
            r"regist\w+\b.*(setup|on_fit_start|on_train_start)",
        ),
        near_fix=(r"hooks?\b", r"DeadUnits", r"register_forward_hook"),
        accuse=(
            r"hooks?\b.*(grow|pile|accumulat|never removed|not removed)",
            r"register_forward_hook",
            r"steps? (get|become|grow)\w*\b.*(slow|long)",
        ),
    ),
    Expected(
        name="histograms_each_step",
        cause=(
            r"histogram",
            r"Histograms",
            r"SummaryWriter",
            r"tensorboard",
            r"on_before_optimizer_step",
        ),
        near=HOOK,
        fix=(
            r"\bless often|\brarely\b|\bseldom\b|log_every_n_steps|\binterval\b",
            r"(every|each) (few|some|n|n-th|nth|\d+\w*|hundred\w*|fifty|50th)\b",
            r"(fewer|less|sampl\w+|skip|reduce)\b.*(histogram|log|Histograms)",
        ),
        near_fix=(r"histogram", r"Histograms", r"on_before_optimizer_step", r"tensorboard", r"background|thread"),
        accuse=(r"histogram", r"SummaryWriter", r"on_before_optimizer_step"),
    ),
    Expected(
        name="scored_unmasked",
        cause=(
            r"logits",
            r"vocabulary",
            r"ignore_index",
            r"ignored? (positions|targets|labels|tokens)",
            r"masked (positions|tokens)",
            r"8 x 96 x 4000|8\xd796\xd74000|768 ?[x\xd7] ?4000",
        ),
        near=(
            r"\bhead\b",
            r"cross_entropy|log_softmax|nll_loss",
            r"\bloss\b",
            r"(output|last) layer",
            r"\bLinear\b",
            r"training_step",
            r"matrix (product|multipl)",
        ),
        fix=(
            r"(only|just|select|pick|index|gather|drop|skip)\b.*(masked|scored|label|target|position|token|row)",
            r"(masked|scored|labell?ed|ignored) (positions|tokens|rows)",
            r"before the head",
            r"ignore_index|ignored",
            r"hidden\[mask",
            r"sampled softmax|adaptive_?(log_?)?softmax",
            r"smaller vocabulary",
            r"(fewer|not all|less)\b.*(logits|positions)",
        ),
        near_fix=(
            r"\bhead\b",
            r"logits",
            r"cross_entropy",
            r"fused|chunk\w*\b.*(loss|cross|logits)",
            r"vocabulary",
            r"linear_cross_entropy",
        ),
        accuse=(r"ignore_index", r"ignored? (positions|targets|labels|tokens)", r"vocabulary", r"unused logits"),
    ),
    Expected(
        name="unread_weights",
        cause=(
            r"need_weights",
            r"attention[ -]weights",
            r"attention (scores|matri(x|ces)|probabilities)",
            r"(without|not|no) (the )?(fused|flash)",
            r"unfused",
            r"L ?[x\xd7] ?L",
            r"480 ?[x\xd7] ?480",
        ),
        near=(r"attention", r"MultiheadAttention", r"softmax", r"\bbmm\b|baddbmm", r"materiali[sz]"),
        fix=(
            r"need_weights ?= ?False",
            r"scaled_dot_product_attention",
            r"\bSDPA\b",
            r"(fused|flash) (attention|kernel)",
        ),
        near_fix=(r"attention", r"average_attn_weights", r"need_weights"),
        accuse=(r"need_weights", r"attention[ -]weights", r"unfused", r"(without|not|no) (the )?(fused|flash)"),
    ),
    Expected(
        name="one_hot_lookup",
        cause=(
            r"one[_ -]?hot",
            r"Baskets\.lookup",
            r"\blookup\b",
            r"(mostly|almost all|only|sparse)\b.*zeros?\b",
            r"zeros?\b.*(product|matri|multipl)",
            r"256 ?[x\xd7] ?16 ?[x\xd7] ?1400|4096 ?[x\xd7] ?1400",
        ),
        near=(r"\bmatmul\b|\bmm\b", r"matrix (product|multipl)", r"\bscatter_?\b", r"\btable\b"),
        fix=(
            r"\bembedding\b",
            r"nn\.Embedding",
            r"EmbeddingBag",
            r"index_select",
            r"\bindex(ing)?\b.*(table|rows?|weight)",
            r"look(s|ed|ing)? ?up\b.*(rows?|table|index)",
            r"\brows? of the (table|weight)",
            r"(instead of|replace|avoid|without|drop)\b.*one[_ -]?hot",
        ),
        near_fix=(r"one[_ -]?hot", r"\blookup\b", r"sparse"),
        accuse=(r"one[_ -]?hot", r"(mostly|almost all|sparse)\b.*zeros?\b"),
    ),
    Expected(
        name="exact_norms",
        cause=(
            r"\bsvd",
            r"singular",
            r"matrix_norm",
            r"linalg",
            r"Critic\.stretch",
            r"\bstretch\b",
            r"spectral",
            r"decomposition",
        ),
        near=(r"penalt", r"regulari[sz]", r"training_step", r"\bloss\b", r"\bnorms?\b"),
        fix=(
            r"power (iteration|method)",
            r"spectral_norm",
            r"(every|each) (few|some|n|\d+\w*) steps",
            r"less often|not (in )?every step",
            r"approximat",
            r"svd_lowrank|lobpcg|low[- ]rank",
            r"Frobenius",
            r"(avoid|replace|without|instead of|cheaper)\b.*(svd|singular|decomposition|matrix_norm|linalg|stretch)",
        ),
        near_fix=(r"\bsvd", r"singular", r"matrix_norm", r"linalg", r"stretch", r"decomposition"),
        accuse=(r"\bsvd", r"singular", r"matrix_norm", r"decomposition"),
    ),
    Expected(
        name="summed_parts",
        cause=(
            r"(graphs?|activations?)\b.*(all|several|every|\d+) (of the )?(parts|chunks|forward|micro)",
            r"(several|\d+|many|all|repeated) (forward|calls)\w*\b.*(before|until|one|single)\b.*backward",
            r"(one|single|late) backward",
            r"(sum|summed|total|accumulat)\w*\b.*loss",
            r"loss\w*\b.*(sum|summed|accumulat)",
        ),
        near=(
            r"activations?",
            r"saved (for|tensors)",
            r"autograd graph|\bgraphs?\b",
            r"held for (the )?backward",
            r"forward",
        ),
        fix=(
            r"backward\b.*(each|every|per|after|inside|within|in the loop|at once)",
            r"(each|every|per|after)\b.*\bbackward",
            r"manual_backward",
            r"accumulate (the )?gradients?",
            r"gradient accumulation",
            r"accumulate_grad_batches",
        ),
        near_fix=(r"checkpoint", r"smaller (batch|parts)", r"batch size", r"bf16|half precision", r"backward"),
        accuse=(
            r"(graphs?|activations?)\b.*(all|several|every|\d+) (of the )?(parts|chunks|forward|micro)",
            r"(one|single|late) backward",
            r"(sum|summed|accumulat)\w*\b.*loss",
        ),
        is_note=True,
    ),
    Expected(
        name="every_stage",
        cause=(
            r"Hearts\.setup",
            r"\bsetup\b",
            r"Beats\b",
            r"\b(testing|unlabeled)\b",
            r"(test|predict\w*)\b.*(data|set|stage)",
            r"(data ?sets?|data) (that|which) (is|are|the fit does) (not|never)",
            r"(not|never|un)\s?(used|read)\b.*(fit|training|data)",
        ),
        near=(r"DataModule", r"data ?sets?\b", r"Hearts", r"in memory", *MEMORY_HOLDERS),
        fix=(
            r"\bstage\b",
            r"(test|predict\w*)\b.*(only|lazily|when|later|setup|not)",
            r"(only|lazily|when|later|not|don't|drop)\b.*(test|predict\w*|needed|needs|used)",
            r"load\w*\b.*(lazily|on demand|when)",
        ),
        near_fix=(r"memory[- ]map|mmap|memmap", r"\bsetup\b", r"Hearts", r"Beats", r"data ?sets?\b", r"float16|int16"),
        accuse=(
            r"\b(testing|unlabeled)\b",
            r"(test|predict)\w* (data|set|stage)",
            r"(not|never|un)\s?(used|read)\b.*(fit|data)",
        ),
        is_note=True,
    ),
    Expected(
        name="copied_argument",
        cause=(
            r"save_hyperparameters",
            r"\bhparams\b|hparams_initial",
            r"hyper-?parameters?",
            r"deep-?cop(y|ies)",
            r"cop(y|ies)\b.*\b(vectors|argument)",
            r"\b(vectors|tensor|argument)\b.*\b(copied|copies|twice|several times|duplicat)",
        ),
        near=(r"Ranker\.__init__", r"\bRanker\b", r"duplicat", r"\bvectors\b", *MEMORY_HOLDERS),
        fix=(
            r"ignore ?=",
            r"save_hyperparameters",
            r"(leave|keep|exclude|ignor|not)\w*\b.*(hparams|hyper-?parameters?)",
            r"(hparams|hyper-?parameters?)\b.*(exclude|ignor|without|not|instead)",
        ),
        near_fix=(r"hparams", r"cop(y|ies)", r"\bvectors\b", r"path"),
        accuse=(r"save_hyperparameters", r"\bhparams\b", r"hyper-?parameters?", r"deep-?cop"),
        is_note=True,
    ),
    Expected(
        name="broadcast_bank",
        cause=(
            r"broadcast",
            r"\bbuffers?\b.*(sync|sent|copied|rank|process|exchang)",
            r"(sync|sends?|copies|exchang)\w*\b.*\bbuffers?\b",
            r"\bbank\b",
            r"sync_buffers",
        ),
        near=(
            r"^communication-bound",
            r"communicat",
            r"\bDDP\b|DistributedDataParallel",
            r"\bgloo\b",
            r"collective|all-?reduce",
            r"between (the )?(ranks|processes)",
            r"wait\w* for (the )?other (rank|process)",
        ),
        fix=(
            r"broadcast_buffers ?= ?False",
            r"broadcast_buffers",
            r"(not|without|instead of|out of|un)\s?(a )?regist\w*\b.*buffer",
            r"plain (tensor|attribute)",
            r"(smaller|fewer|less)\b.*\bbuffers?",
            r"(stop|avoid|skip|no|turn off|disable)\b.*broadcast",
        ),
        near_fix=(r"\bbuffers?\b", r"\bbank\b", r"broadcast", r"communicat\w+\b.*(less|rarer|seldom)"),
        accuse=(r"broadcast", r"\bbuffers?\b.*(sync|sent|copied|exchang)"),
    ),
    Expected(
        name="copied_samples",
        cause=(
            r"deep-?cop(y|ies|ied|ying)",
            r"__getitem__",
            r"Molecules\b",
            r"cop(y|ies|ied|ying)\b.*(sample|molecule)",
        ),
        near=(WAITS, r"collat", r"\bdata ?set\b"),
        fix=(
            r"deep-?cop",
            r"\bclone\b",
            r"(only|just|shallow|avoid|without|not|fewer|less)\b.*\bcop(y|ies|ied|ying)\b",
            r"\bcop(y|ies|ied|ying)\b.*(only|changed|shallow|\bkinds\b|sample|molecule)",
        ),
        near_fix=(
            r"__getitem__",
            r"Molecules\b",
            r"workers|prefetch",
            r"cach|precomput|preprocess|in advance|\bonce\b",
        ),
        # Samples of the healthy twin are made in the main process, too.
        accuse=(r"deep-?cop", r"cop(y|ies|ied|ying)\b.*(sample|molecule)"),
    ),
    Expected(
        name="statistics_each_item",
        cause=(
            r"__getitem__",
            r"Load\.(statistics|__getitem__)",
            r"\bstatistics\b.*(series|sample|item|Load|each|every|data|takes|%)",
            r"(series|sample|item|each|every|data|input)\b.*\bstatistics\b",
            r"\bstd\b|standard deviation|\bdeviation\b",
            r"(whole|entire|full|complete|all of the) (series|tensor|array|data)",
            r"standardi[sz]|normali[sz](e|es|ed|ing|ation)\b.*(sample|item|series|data)",
        ),
        near=(WAITS, r"\bdata ?set\b", r"\bmean\b"),
        fix=(
            r"\bstatistics\b|\bstd\b|deviation|standardi[sz]|normali[sz]",
            r"precomput|preprocess|in advance|beforehand|\bonce\b|cach",
            r"__init__|\bsetup\b",
            r"(out|outside) of .*__getitem__",
        ),
        near_fix=(r"__getitem__", r"workers|prefetch", r"Load\.\w"),
        # Samples of the healthy twin are made in the main process, too.
        accuse=(
            r"Load\.statistics",
            r"\bstd\b|\bdeviation\b",
            r"(whole|entire) (series|tensor)",
            r"standardi[sz]",
        ),
    ),
    Expected(
        name="copied_windows",
        cause=(
            r"Strides\b",
            r"\bwindows\b.*(MiB|GiB|memory|cop|held|holds?|tensor|stack|overlap)",
            r"(MiB|GiB|memory|cop(y|ies|ied)|tensors?|held|holds?|stack\w*|overlap\w*)\b.*\bwindows\b",
            r"\bstack(s|ed|ing)?\b",
            r"overlap",
            r"40,?000 ?[x\xd7] ?256|40,?000, ?256",
            r"habits\.py:\d+.*__init__|__init__.*habits\.py:\d+",
        ),
        near=(
            r"\bdata ?sets?\b",
            r"in memory",
            r"before the (fit|training|first step)",
            r"outside (of )?(the )?(model|training)",
            *MEMORY_HOLDERS,
        ),
        fix=(
            r"\bslic(e|es|ed|ing)\b",
            r"\bunfold\b|as_strided|sliding",
            r"\bviews?\b.*(of|into|instead)",
            r"on[- ]the[- ]fly|on demand|lazi?ly|when (it is |they are )?(read|needed|asked)",
            r"(in|by|to) .*__getitem__",
            r"(instead of|not|avoid|without|don't)\b.*(stack|materiali[sz]|cop(y|ies|ying)|precomput|windows)",
            r"memory[- ]map|mmap|memmap",
        ),
        near_fix=(r"\bwindows\b", r"Strides\b", r"\bstack", r"float16|bfloat16|int16", r"\bdata ?sets?\b", r"smaller"),
        accuse=(
            r"Strides\b.*\b\d{2,}(\.\d+)? ?MiB",
            r"\b\d{2,}(\.\d+)? ?MiB.*Strides\b",
            r"overlap\w* windows",
            r"\bwindows\b.*\b\d{2,}(\.\d+)? ?MiB",
        ),
        is_note=True,
    ),
    Expected(
        name="recall_in_turn",
        cause=(
            r"on_validation_epoch_end",
            r"ranks_in_turn",
            r"argsort|\bsort(s|ed|ing)?\b",
            r"cosine_similarity",
            r"python loop|\bloops? (over|in|of)\b",
            r"(per|each|every|one) (query|picture)|one (by|after) (one|the other)",
            r"validation.*(small|tiny|many|short) (op|call|kernel)",
            r"recall",
        ),
        near=(r"validation", r"\bval\b", r"hooks?\b", r"(?<!profiler )overhead|host-bound"),
        fix=(
            r"on_validation_epoch_end",
            r"ranks_in_turn",
            r"vectori[sz]|batched|at once|all (queries|pictures)|in one (call|go|operator)|chunks",
            r"matmul|matrix (product|multipl)|\bmm\b",
            r"\btop_?k\b|argsort|\bsort",
            r"python loop|\bloops?\b",
            r"torchmetrics|faiss",
        ),
        near_fix=(
            r"val_check_interval|check_val_every_n_epoch|limit_val_batches",
            r"less often|fewer (times|validation|pictures|queries)|rarely",
            r"validat",
            r"recall",
        ),
        accuse=(
            r"ranks_in_turn|cosine_similarity|argsort",
            r"python loop",
            r"on_validation_epoch_end.*\b([2-9]\d|100)(\.\d+)? ?%",
        ),
    ),
    Expected(
        name="disabled_collector",
        cause=(
            r"gc\.disable",
            r"NoPauses",
            r"(garbage|collector|\bgc\b|collection)\b.*(\boff\b|disabled|not (run|enabled)|never|(did|does) not)",
            r"(disabled?|turned off|switched off|without|no)\b.*(garbage|collector|\bgc\b)",
            r"(reference|ref|object|garbage) cycles?|cyclic|\bin (a )?cycles?\b|circular",
            r"Phrase\b",
            r"(parent|child)\w*\b.*(refer|cycle|alive|kept|keeps)",
        ),
        near=(GROWS,),
        fix=(
            r"gc\.(enable|disable|collect|freeze)",
            r"NoPauses",
            r"garbage|collector\b",
            r"(reference|ref|object) cycles?|cyclic|\bcycles?\b|circular",
            r"weak-?\s?ref",
            r"Phrase\b",
            r"\bparents?\b",
        ),
        near_fix=(r"refer|\bhold|\bkept\b|\bkeeps?\b", r"snapshot", r"\bobjects?\b", r"detach|graph", r"tensors?"),
        accuse=(*GROWTH, r"gc\.disable|collector is (off|disabled)", r"reference cycles?"),
    ),
    Expected(
        name="features_in_checkpoint",
        cause=(
            r"(checkpoint|state_dict|\bsav(e|es|ed|ing)\b|writ)\w*\b.*(\bfeatures\b|\bbuffers?\b)",
            r"(\bfeatures\b|\bbuffers?\b).*(checkpoint|state_dict|\bsav(e|es|ed|ing)\b|writ)",
            r"persistent (buffer|features|state|tensor)|persistent ?=",
            r"(constant|fixed|untrained|not trained|unchanged|never changes?|frozen)\b.*checkpoint",
            r"checkpoint.*(constant|fixed|untrained|not trained|unchanged|never changes?|frozen)",
        ),
        near=(r"checkpoint", r"callback", r"on_train_batch_end", r"\bsav(e|es|ing)\b|writ(e|es|ing)\b"),
        fix=(
            r"persistent ?=",
            r"persistent",
            r"\bbuffers?\b",
            r"\bfeatures\b",
            r"(exclude|leave|keep|drop|remov|without|filter)\w*\b.*(checkpoint|state_dict|tensor|constant|fixed)",
            r"(plain|ordinary) (tensor|attribute)",
            r"on_save_checkpoint|state_dict",
            r"smaller checkpoint|checkpoints? smaller|(save|write|store)s? less in",
        ),
        near_fix=(
            r"every_n_train_steps|every_n_epochs|train_time_interval|less often|fewer checkpoints",
            r"async",
            r"save_weights_only",
            r"checkpoint",
        ),
        # The healthy twin writes as many, but small checkpoints.
        accuse=(
            r"checkpoint.*(\bfeatures\b|\bbuffers?\b)",
            r"(\bfeatures\b|\bbuffers?\b).*checkpoint",
            r"persistent ?=",
            r"checkpoint.*\b([4-9]\d|100)(\.\d+)? ?%",
        ),
    ),
    Expected(
        name="synced_each_part",
        cause=(
            r"no_sync|block_backward_sync",
            rf"{REDUCES}\b.*{PASSES}",
            rf"{PASSES}.*{REDUCES}",
            r"(accumulat|micro-?batch)\w*\b.*(sync|all.?reduc|communicat)",
            r"(sync|all.?reduc|communicat)\w*\b.*(accumulat|micro-?batch)",
            r"gradients? .*(4|four|several|multiple) times",
        ),
        near=(
            r"^communication-bound",
            r"communicat",
            r"\bDDP\b|DistributedDataParallel",
            r"\bgloo\b",
            r"collective|all.?reduc",
            r"between (the )?(ranks|processes)",
            r"wait\w* for (the )?other (rank|process)",
            r"manual_backward",
        ),
        fix=(
            r"no_sync|block_backward_sync",
            r"(only|just|once)\b.*\b(last|final|per (optimizer )?step|before the (optimizer|step))",
            r"\b(last|final) (part|micro-?batch|backward|pass|chunk)",
            r"accumulat\w*\b.*(local|without|sync|before)",
            r"accumulate_grad_batches",
            r"(one|single) (backward|all.?reduc)",
            r"once (per|a|each) step",
        ),
        near_fix=(
            r"accumulat",
            r"bucket|compress|bf16|fp16|\bhook\b",
            r"communicat|all.?reduc|collective|\bsync",
            r"(larger|bigger) (batch|part)",
            r"fewer|less often|overlap",
        ),
        accuse=(
            r"no_sync|block_backward_sync",
            r"(all.?reduc|\bsync)\w*\b.*((4|four|several) times|(each|every|per) (backward|part|micro))",
        ),
    ),
    Expected(
        name="batch_as_time",
        cause=(
            r"batch_first",
            r"(LSTM|recurrent|\brnn)\w*\b.*(\b1,?024\b|time steps|sequence|sequential|batch (dim|axis)|step by step)",
            r"(\b1,?024\b|sequence|sequential\w*|batch (dim\w*|axis))\b.*(LSTM|recurrent|\brnn)",
            r"(batch|samples)\b.*\b(as|for)\b.*\b(time|sequence)",
            r"\b1,?024 (time )?steps",
            r"(wrong|swapped|transposed|mixed up|confused) (dim|ax|layout|order)",
        ),
        near=(r"LSTM", r"\brecurrent\b", r"mkldnn_rnn|\brnn", r"(small|tiny|many|short) (op|call|kernel)"),
        fix=(
            r"batch_first",
            r"transpos|permut|movedim|swapaxes",
            r"(time|sequence|batch)[- ](first|dim\w*|axis)",
            r"(batch|samples)\b.*\b(as|for)\b.*\b(time|sequence)",
            r"(layout|order|shapes?) (of|that)\b.*(input|LSTM|recurrent)",
            r"length x batch|(L|T), ?(N|B)\b",
        ),
        near_fix=(r"LSTM|\brecurrent\b", r"\bGRU\b", r"sequence|shorter", r"pack(ed)?_"),
        accuse=(
            r"batch_first",
            r"\b1,?024 (time )?steps",
            r"(batch|samples)\b.*\b(as|for) (the )?(time|sequence)",
            r"LSTM.*\b1,?024\b",
        ),
    ),
    Expected(
        name="column_and_row",
        cause=(
            r"broadcast",
            r"2048 ?[x\xd7*,] ?2048",
            r"\(?2048, ?1\)|2048 ?[x\xd7] ?1\b",
            r"\bn ?[x\xd7] ?n\b|\bN\^2\b|quadratic",
            r"(shapes?|sizes?)\b.*(differ|mismatch|unequal|not (match|equal|the same))",
            r"(differ\w*|mismatch\w*|unequal) (shapes?|sizes?)",
            r"all (pairs|prices|targets)|pairwise",
            r"\bmse_?loss.*(MiB|elements|temporar|intermediate|large|big|huge)",
            r"(MiB|elements|temporar\w*|intermediate|large|big|huge)\b.*\bmse_?loss",
        ),
        near=(
            r"mse_?loss",
            r"\bloss\b",
            r"element-?wise|memory-bound|memory bandwidth",
            r"(large|big|huge|temporary|intermediate) (\w+ )?(tensors?|results?|allocations?)",
        ),
        fix=(
            r"squeez",
            r"broadcast",
            r"view_as|\breshape|flatten|\bview\(|\.view\b",
            r"(same|equal|match\w*) (shapes?|sizes?)",
            r"(shapes?|sizes?)\b.*(match|same|equal|agree)",
            r"\[:, ?0\]|\[:, ?None\]",
        ),
        near_fix=(r"mse_?loss|\bloss\b", r"\bshapes?\b", r"fuse|torch\.compile|chunk|temporar", r"element-?wise"),
        accuse=(r"broadcast", r"2048 ?[x\xd7*,] ?2048", r"pairwise|all pairs", r"mismatch"),
    ),
    Expected(
        name="diagonal_matrices",
        cause=(
            r"Multivariate",
            r"cholesky",
            r"covariance",
            r"diag_embed|\bdiagonal\b",
            r"triangular",
            r"linalg",
            r"Digits\.normal",
            r"(matrix )?(decomposition|factori[sz]ation)",
            r"256 ?[x\xd7] ?32 ?[x\xd7] ?32",
        ),
        near=(r"distribution", r"rsample", r"kl_divergence|\bKL\b", r"posterior|\bprior\b"),
        fix=(
            r"\bIndependent\b",
            r"\bNormal\(|nn?\.?distributions\.Normal|(independent|univariate|plain|diagonal) (normal|gaussian)",
            r"\bdiagonal\b",
            r"scale_tril",
            r"element-?wise",
            r"closed[- ]form|reparam\w*",
            r"(avoid|replace|without|instead of|drop|cheaper)\b.*(Multivariate|cholesky|covariance|linalg|decompos)",
        ),
        near_fix=(
            r"Multivariate|cholesky|covariance|linalg|triangular|Digits\.normal",
            r"distribution",
            r"validate_args",
        ),
        accuse=(r"Multivariate|cholesky|covariance|diag_embed|triangular|linalg",),
    ),
    Expected(
        name="message_per_edge",
        cause=(
            r"\bper[- ]edge|(each|every|all|of the|\d) edges?\b|\bedges\b",
            r"9,?000",
            r"nodes\[source\]|\[source\]",
            r"(gather|index|select|cop)\w*\b.*\b(before|first|then)\b.*(Linear|message|layer|matri|network)",
            r"(repeat|duplicat|same|equal|identical)\w* (\w+ )?(rows|inputs?|nodes?|samples|values)",
            r"(rows|inputs?|nodes?|values)\b.*(repeat|duplicat|several times|6 times|six times|more than once)",
            r"redundan",
        ),
        near=(
            r"\bmessages?\b",
            r"Neighbors\b",
            r"\bindex(_select|ing|_put_?|_backward)?\b|\bgather\b",
            r"index_add|scatter",
        ),
        fix=(
            r"\bbefore\b.*(gather|index|cop(y|ies|ying)|select|edges?|\[source\])",
            r"\bper[- ]node|(on|for|over|to|of|each|1,?500) (the |all )?(\w+ )?nodes?\b",
            r"(gather|index|select)\w*\b.*\b(after|afterwards|later|results?|outputs?|messages)\b",
            r"\bthen (gather|index|select|cop)",
            r"(swap|move|reorder|push|hoist|exchange)\w*\b.*(gather|index|Linear|message|edges?|node)",
            r"\bunique\b|\bonce\b.*(node|row)",
        ),
        near_fix=(r"\bmessages?\b", r"edges?\b", r"gather|\bindex|scatter", r"sparse", r"Neighbors\b"),
        accuse=(
            r"\bper[- ]edge|(each|every) edge\b",
            r"9,?000",
            r"(repeat|duplicat|identical)\w* (\w+ )?(rows|inputs?|nodes?)",
            r"redundan",
        ),
    ),
    Expected(
        name="enlarged_channels",
        cause=(
            ENLARGE,
            r"(full|high|higher|original|output) (size|resolution)",
            r"128 ?[x\xd7] ?128",
            r"(32|all|too many) channels",
            r"\bclassify\b",
        ),
        near=(
            r"1 ?[x\xd7] ?1\b",
            r"(large|big|huge|temporary|intermediate) (\w+ )?(tensors?|results?|allocations?|activations?)",
            r"memory-bound|memory bandwidth",
        ),
        fix=(
            rf"\b(before|then|after)\b.*{ENLARGE}",
            rf"{ENLARGE}\b.*\b(after|last|later|at the end|logits|scores|classes|fewer|4)\b",
            r"(classif|convol|1 ?[x\xd7] ?1|project|reduc)\w*\b.*\b(before|first|at the (low|small))",
            r"fewer channels|(4|four) (channels|classes)",
            r"(low|lower|small|smaller|coarse|coarser|reduced) (size|resolution)",
            r"\b(swap|reorder|commut|exchange)",
        ),
        near_fix=(ENLARGE, r"nearest|ConvTranspose|PixelShuffle|pixel_shuffle", r"channels_last", r"\bclassify\b"),
        # The healthy twin enlarges four channels, which takes some time.
        accuse=(rf"{ENLARGE}\b.*\b([3-9]\d|100)(\.\d+)? ?%", r"(32|all|too many) channels"),
    ),
    Expected(
        name="decay_in_loss",
        cause=(
            r"penalt",
            r"regulari[sz]",
            r"weight[_ -]decay",
            r"\bL2\b",
            r"\bpow\b|\bpow_|PowBackward|\bsquar(e|es|ed|ing)\b",
            r"(all|each|every) (of the |of its )?(parameters?|weights?)\b.*\bloss\b",
            r"\bloss\b.*(all|each|every) (of the |of its )?(parameters?|weights?)",
        ),
        near=(r"element-?wise", r"\bloss\b", r"memory-bound|memory bandwidth", r"(small|many) op"),
        fix=(
            r"weight[_ -]decay",
            r"\bdecay\b.*optimi[sz]er|optimi[sz]er\w*\b.*\b(decay|penalt|regulari[sz])",
            r"(penalt|regulari[sz])\w*\b.*optimi[sz]er",
            r"AdamW|\bSGDW\b|decoupled",
        ),
        near_fix=(
            r"penalt|regulari[sz]|\bpow\b|\bsquar|\bL2\b",
            r"_foreach|foreach",
            r"fuse|torch\.compile",
            r"less often|(every|each) (few|\d+\w*) steps",
        ),
        accuse=(r"penalt|regulari[sz]", r"\bpow\b|PowBackward|squar(e|es|ed|ing)\b", r"weight[_ -]decay"),
    ),
    Expected(
        name="views_of_states",
        cause=(
            r"\bviews? (of|that|into|in|on|keep|hold)|\b(as|are|is a|a|through) views?\b",
            r"\bslices? (of|that|into|keep|hold)",
            r"\bstorages?\b",
            r"base tensors?",
            r"\bdeque\b|\bearlier\b|\bqueue\b",
            rf"({HOLDS}).*(Sentences|\bhidden\b|\bencode\b|\bkeys\b|states|normali[sz]e|shapes\.py:\d)",
            rf"(Sentences|\bhidden\b|\bencode\b|\bkeys\b|states|normali[sz]e|shapes\.py:\d).*({HOLDS})",
        ),
        near=(r"grow|leak|accumulat|rises|increas", r"\b(keeps?|kept|holds?)\b.*(tensors?|alive|MiB)"),
        fix=(
            r"\bclon(e|es|ed|ing)\b",
            r"\bcop(y|ies|ied|ying)\b",
            r"contiguous",
            r"\bstorages?\b",
            r"pre-?allocat|ring buffer|buffer (of|for|with)",
        ),
        near_fix=(
            r"\bdeque\b|maxlen|\bqueue\b|\bearlier\b",
            r"\bviews?\b|\bslices?\b",
            r"detach|append|\bkeys\b",
            r"hold|refer|snapshot|\bkept\b|\bkeeps?\b",
        ),
        accuse=(*GROWTH, r"\bviews? (of|that|into|keep|hold)", r"\bstorages?\b.*\b\d{2,}(\.\d+)? ?MiB"),
        is_note=True,
    ),
    # --- feeding.py ---
    Expected(
        name="biopsies",
        cause=(
            r"\b(decod|PNG|PIL\b|Pillow|ImageFile|Image\.(open|load|convert|resize))",
            r"\b(convert|resiz)\w* (the )?(image|pict)",
            r"BiopsyTiles",
            r"__getitem__",
            r"(loading|reading|preparing|making|each|per|a|one) samples?\b.*\b(takes?|costs?|ms|s|slow|long|too)\b",
        ),
        near=WAITS_FOR_DATA,
        fix=(
            r"decod|PNG|resiz|smaller|downscal|thumbnail|draft|cach|convert|format|turbo|SIMD|offline",
            r"(ahead of time|in advance|beforehand|once|before (the )?training|pre-?(process|comput|par|scal))",
            r"(store|save|write|keep).*(array|tensor|raw|memory|map|size|pixels|decoded)",
            r"(cheaper|faster|lighter|less|speed up|reduce).*(sample|BiopsyTiles|__getitem__|load|transform)",
        ),
        near_fix=(r"workers", r"BiopsyTiles|__getitem__"),
    ),
    Expected(
        name="playlists",
        cause=(r"collat", r"batch_with_negatives", r"negatives?\b", r"randrange|randbelow"),
        near=WAITS_FOR_DATA,
        fix=(
            r"collat",
            r"batch_with_negatives",
            r"vectori[sz]|numpy|NumPy|torch\.randint|tensor operation|whole batch at once|one (call|operation)",
            r"negative",
        ),
        near_fix=(r"workers",),
    ),
    Expected(
        name="crops",
        cause=(
            r"num_workers\s*(=|is|of|:)?\s*(0|zero)\b",
            r"\b(no|zero|0|without( any)?|lacks?|missing|too few) (\w+ )?workers?\b",
            r"(main|training|same|own) (process|thread|loop).*(load|read|fetch|data|batch|sample|get\b|store)",
            r"(load|read|fetch|data|batch|sample)\w*.*\bin the (main|training|same) (process|thread|loop)",
            r"(nothing|not|never) .*(overlap|parallel|background|ahead|prefetch)",
        ),
        near=(*WAITS_FOR_DATA, r"ObjectStore|SatelliteChips|time\.sleep|\bsleep"),
        fix=(r"num_workers", r"\bworkers?\b(?!.*pin)"),
        near_fix=(r"prefetch|background|ahead|concurrent|async|thread|cache|fetch|overlap|ObjectStore|SatelliteChips",),
    ),
    Expected(
        name="gait",
        cause=(
            r"\b(16|sixteen) (\w+ )?(workers?|loader|processes).*\b(core|cpu|processor|too many|more than|start)",
            r"(more|too many|far more|fewer) (\w+ )?(workers|processes)",
            r"num_workers\s*=?\s*16.*(core|cpu|processor|start)",
            r"workers?\b.*\b(than|for|on|share|compete|fight|crowd).*\b(cores?|CPUs?|processors?)\b",
            r"cores?\b.*\b(16|many) (\w+ )?(workers|processes)",
            r"over-?subscri|over-?commit",
        ),
        near=(
            *WAITS_FOR_DATA,
            r"workers?.*(start|launch|first batch)",
            r"first batch",
            r"wait(s|ed|ing)? for a (core|CPU|processor)",
            r"processes.*(take|share|compete).*(core|CPU)",
        ),
        fix=(
            r"(fewer|reduce|lower|less|decrease|at most|no more than|not more|limit|cut).*(workers|processes)",
            r"num_workers\s*(=|to|of|from 16 to|below|<=?|at)\s*[0-8]\b",
            r"workers.*\b(as many|number of|match|one per|than|to)\b.*\b(cores?|CPUs?|processors?|[0-4])\b",
        ),
        near_fix=(r"num_workers|workers", r"diary|GaitWindows|json|read (it )?once|worker_init"),
        accuse=(
            r"\b(16|sixteen) (\w+ )?(workers?|processes)",
            r"(more|too many|far more|fewer) (\w+ )?workers",
            r"over-?subscri|over-?commit",
        ),
    ),
    Expected(
        name="reviews",
        cause=(
            r"persistent_workers",
            r"workers?\b.*\b(re-?start|re-?creat|re-?spawn|re-?launch|new|anew|again|shut|start\w*|fork\w*)\b.*\bepoch",
            r"epochs?\b.*\b(re-?start|re-?creat|re-?spawn|re-?launch|start|stop|fork|new)\w*\b.*\bworkers?",
            r"(re-?start|re-?creat|re-?spawn|re-?launch)\w*.*workers?",
            r"workers?.*(re-?start|re-?creat|re-?spawn|re-?launch)",
        ),
        near=(
            *WAITS_FOR_DATA,
            r"(first batch|start|beginning|end|between|each|every|short) .*epoch",
            r"workers?.*start",
        ),
        fix=(r"persistent_workers", r"keep.*workers.*(alive|running|between|across)", r"workers.*persist"),
        near_fix=(
            r"longer epochs|fewer epochs",
            r"json|vocabulary|Reviews|once|before the workers|__init__|in the parent",
        ),
        accuse=(
            r"persistent_workers",
            r"(re-?start|re-?creat|re-?spawn|re-?launch)\w*.*workers?",
            r"workers?.*(re-?start|re-?creat|re-?spawn|re-?launch)",
        ),
    ),
    Expected(
        name="shapes",
        cause=(
            r"\b(every|each|about every|one in|one of)\s+~?\d+(st|nd|rd|th)?\.?\s+(batch|step|sample|fetch|load)",
            r"(some|few|single|periodic|regular|recurr|occasional|rare)\w*.*\b(batch|step|sample|archive|shard|file)",
            r"(archive|shard)s?\b",
            r"fetch_archive|fetch_all|CloudArchives",
            r"(spike|burst|period|bimodal|outlier|stall)",
        ),
        near=(*WAITS_FOR_DATA, r"time\.sleep|\bsleep"),
        fix=(
            r"prefetch|ahead|in advance|background|thread|async|overlap|read-ahead|buffer",
            r"(smaller|split|local|copy|stage|cache|download).*(archive|shard|file|disk|transfer)",
            r"(archive|shard|file)s?\b.*(smaller|split|local|copy|stage|cache|before|early|earlier)",
            r"fetch_archive|CloudArchives",
        ),
        near_fix=(r"workers", r"time\.sleep|\bsleep", r"cache|local|faster (disk|storage|network)"),
    ),
    Expected(
        name="sessions",
        cause=(
            r"\bpad(s|ded|ding)?\b",
            r"(masked|ignored|empty|unused|zero|blank|filler)\b.*\b(position|token|element|item|value|click|entr)",
            r"(position|token|element|item|value|click|entr)\w*.*\b(masked|ignored|empty|unused|filler|are (0|zero))\b",
        ),
        near=(r"session_batch", r"to_length|longest", r"sequence length"),
        fix=(
            r"\bpad",
            r"bucket|trim|crop|truncat|nested|jagged|pack|varlen|dynamic length",
            r"(length|longest)",
            r"(sort|group|batch).*(by|of|similar|same).*length",
            r"session_batch|to_length",
        ),
        accuse=(
            r"\bpad.*\b([3-9]\d)\s*%",
            r"\b([3-9]\d)\s*%.*\b(pad|masked|ignored|empty)",
            r"(most|mostly).*\b(pad|masked)",
        ),
    ),
    # --- keeping.py ---
    Expected(
        name="inspection",
        cause=(
            r"InspectionReport|\brecords\b",
            (
                r"(grow|leak|keep|kept|accumul|collect|hold|held|retain|append|pile)\w*.*"
                r"\b(numpy|ndarray|arrays?|host objects?|python objects?|list|dict|callback)"
            ),
            (
                r"\b(numpy|ndarray|arrays?|host objects?|python objects?|list|dict|callback)\w*\b.*"
                r"(grow|leak|keep|kept|accumul|collect|hold|held|retain|append|pile)"
            ),
        ),
        near=(*MEMORY_GROWS, r"on_train_batch_end"),
        fix=(
            r"InspectionReport|\brecords\b",
            r"(keep|store|collect|append|save|hold) (only|just|less|fewer|no|the (mean|sum|number|scalar|result))",
            r"(clear|empty|drop|delete|release|free|remove|bound|limit|trim)\b.*(list|array|record|callback|refer|it|them)",
            r"(stop|not|instead of) (keep|stor|collect|append|hold)",
            r"aggregat|running (mean|sum|statist)|summari|deque|maxlen|write.*(disk|file)",
        ),
        near_fix=(r"on_train_batch_end|callback|referr|gc\.get|tracemalloc|hold|kept",),
        accuse=(
            r"InspectionReport|\brecords\b",
            r"(grow|leak|accumul|retain|pile)\w*.*\b(numpy|array|host|python object|list|memory|MiB|GiB|MB|GB)",
        ),
    ),
    Expected(
        name="pricing",
        cause=(
            r"entropy_total",
            (
                r"(graph|attached|undetached|detach|grad_fn|autograd|requires_grad|history)\b.*"
                r"(grow|keep|kept|hold|held|retain|alive|leak|accumul|entropy|step|chain)"
            ),
            (
                r"(grow|keep|kept|hold|held|retain|alive|leak|accumul|chain)\w*.*"
                r"\b(graphs?|attached|undetached|detach|grad_fn|autograd)"
            ),
        ),
        near=MEMORY_GROWS,
        fix=(r"detach", r"\.item\b|\bitem\(", r"\bfloat\(", r"no_grad", r"inference_mode"),
        near_fix=(r"entropy_total|entropy", r"reset|clear|release|graph|PricingPolicy|training_step"),
        accuse=(r"entropy_total", r"graphs?\b.*(grow|kept|alive|retain|leak)", *MEMORY_GROWS),
    ),
    Expected(
        name="scans",
        cause=(
            r"workers?\b.*(grow|cach|leak|rise|accumul|keep|kept|hold|\+\s?\d|more .*(batch|step|sample))",
            r"(grow|cach|leak|rise|accumul|keep|kept|hold)\w*.*\bworkers?\b",
            r"(ScanCrops|dataset).*(cache|grow|keep|hold)",
            r"cache.*(ScanCrops|dataset|grow)",
        ),
        near=(*MEMORY_GROWS, r"workers?.*(memory|MiB|GiB|MB|GB)"),
        fix=(
            r"\bcache|cach(e|es|ed|ing)\b",
            r"lru|maxsize|evict|bound|limit|cap\b",
            r"memory-?map|mmap|shared memory|share_memory",
            r"(keep|hold|store|collect)\w* (less|no|nothing|only|fewer)|stop (keep|stor|hold|cach)",
        ),
        near_fix=(
            r"fewer workers|persistent_workers|max_tasks|restart.*worker",
            r"ScanCrops|dataset|__getitem__|worker",
        ),
        accuse=(
            r"workers?\b.*(grow|leak|rise|accumul)",
            r"(grow|leak|rise|accumul)\w*.*\bworkers?\b",
            r"(ScanCrops|dataset).*(cache|grow)",
        ),
    ),
    Expected(
        name="speech",
        cause=(
            r"activation",
            r"(saved|kept|stored|held|save|keep)\w*\b.*\b(backward|autograd)",
            r"(backward|autograd)\b.*\b(saved|kept|stored|held|saves|keeps|holds)",
            r"saved tensors",
        ),
        near=(r"FrameBlock|PhonemeTagger", r"blocks"),
        fix=(
            r"checkpoint|recomput",
            r"(smaller|reduce|lower|halve|shorter|split).*(batch|frame|sequence|length|input|micro)",
            r"accumulate_grad|gradient accumulation|micro-?batch",
            r"bf16|bfloat16|16-?bit|half|precision|offload|in-?place|save_on_cpu|reversible",
        ),
        near_fix=(r"batch|FrameBlock|activation",),
        accuse=(
            # Most of what little there is are activations; the fault has more than twice as many.
            r"(activation|saved|kept for).*\b[2-9]\d\d(\.\d+)?\s*(MiB|MB)",
            r"\b[2-9]\d\d(\.\d+)?\s*(MiB|MB).*(activation|saved|kept for)",
        ),
        is_note=True,
    ),
    Expected(
        name="genes",
        cause=(
            r"optimi[sz]er.*(state|moment|averag|memory|MiB|GiB|MB|GB|keeps|holds)",
            r"(state|moment|memory|MiB|GiB|MB|GB)s?\b.*(optimi[sz]er|Adam)",
            r"Adam\w*\b.*(state|moment|averag|memory|MiB|GiB|MB|GB|keeps|holds)",
            r"exp_avg",
        ),
        near=(r"(parameter|gradient)s?.*(memory|MiB|GiB|MB|GB)", r"model states?"),
        fix=(
            r"\bSGD|Adafactor|8-?bit|bitsandbytes|\bLion\b|GaLore|Muon|AdaFactor|factored|foreach",
            r"bf16|bfloat16|16-?bit|half|low(er)? precision|quanti[sz]",
            r"ZeRO|\bshard|FSDP|DeepSpeed|offload",
            r"(other|lean|light|small|less|cheap|memory.efficient|without|no) .*(optimi[sz]er|state|moment)",
            r"optimi[sz]er.*(with|that|which|without).*(less|fewer|no|one|half|small|lean|single).*",
            r"(smaller|fewer|narrow|low.rank|LoRA|freez|sparse).*(parameter|layer|model|weight)?",
        ),
        near_fix=(r"optimi[sz]er|AdamW?",),
        accuse=(
            r"optimi[sz]er.*(state|moment)s?\b.*(MiB|GiB|MB|GB|%)",
            r"(MiB|GiB|MB|GB|%).*optimi[sz]er.*(state|moment)",
            r"exp_avg|Adam",
        ),
        is_note=True,
    ),
    Expected(
        name="palettes",
        cause=(
            r"soft_histogram.*(MiB|GiB|MB|GB|alloc|memory|peak|temporar|intermediate|tensor|large)",
            r"(MiB|GiB|MB|GB|alloc|memory|peak|temporar|intermediate|tensor|large).*soft_histogram",
            r"(temporar|intermediate|short-lived|scratch).*(MiB|GiB|MB|GB|alloc|memory|peak|tensor|%)",
            r"(MiB|GiB|MB|GB|memory|peak|%).*(temporar|intermediate|short-lived|scratch)",
            r"broadcast.*(MiB|GiB|MB|GB|memory|peak|tensor)",
            r"(one|single|a) (large |big |huge )?(operat(or|ion)|op|allocation|tensor|expression)\b.*(peak|[MG]i?B)",
        ),
        near=(r"soft_histogram", r"allocat.*(peak|MiB|GiB|MB|GB)", r"aten::(sub|abs|mul|rsub|relu|clamp)"),
        fix=(
            r"chunk|in parts|piece|split|loop|at_once|picture by picture|fewer bins|tile|slice|group",
            r"histc|bincount|scatter|bucketi[sz]e|without (making|building|materiali)|materiali|broadcast",
            r"in-?place|out=|fuse|compile|reuse|preallocat|lower precision|half|16-?bit|uint8",
            r"smaller",
            r"soft_histogram",
        ),
        near_fix=(r"batch|temporar|intermediate",),
        accuse=(
            r"soft_histogram.*(MiB|GiB|MB|GB|alloc|memory|peak|temporar|intermediate)",
            r"(MiB|GiB|MB|GB|alloc|memory|peak|temporar|intermediate).*soft_histogram",
        ),
        is_note=True,
    ),
    Expected(
        name="restoration",
        cause=(
            r"validation_outputs",
            r"validation\b.*(output|collect|keep|kept|accumul|append|hold|held|retain|gather|list|grow)",
            r"(output|collect|keep|kept|accumul|append|hold|held|retain|gather|list|grow)\w*.*\bvalidation",
            r"(outputs|restored) .*(kept|held|collected|appended|retained|accumulat)",
        ),
        near=(*MEMORY_GROWS, r"validation.*(memory|MiB|GiB|MB|GB|peak)", r"(memory|MiB|GiB|MB|GB|peak).*validation"),
        fix=(
            r"validation_outputs",
            r"torchmetrics|\bmetric\b|running (mean|sum)|accumulat|aggregat|per batch|batch by batch|each batch|reduce",
            r"(keep|store|collect|append) (only|just|less|no|the (mean|sum|number|scalar|error|statistic|result))",
            r"(stop|not|instead of) (keep|stor|collect|append|hold)",
            r"(clear|empty|drop|delete|release|free)\b.*(list|output|restor)",
            r"self\.log|scalar",
        ),
        near_fix=(r"Restorer|validation_step|validation|release|move.*(disk|CPU)",),
        accuse=(
            r"validation_outputs",
            r"validation\b.*(collect|kept|accumul|append|held|retain|grow)",
            r"(collect|kept|accumul|append|held|retain|grow)\w*.*\bvalidation",
        ),
    ),
    # --- several.py ---
    Expected(
        name="dictation",
        cause=(
            r"rank.*(forward|comput|encoder|training_step|its model|more work|longer sequence|lengths?\b)",
            r"(forward|comput|encoder|training_step|more work|longer|lengths?|sizes?|shapes?)\w*.*\brank",
            (
                r"(uneven|unequal|unbalanced|imbalance\w*|different|larger|longer|more)\b.*"
                r"\b(work|length|size|frame|element|shape|batches|inputs?)\b.*\brank"
            ),
        ),
        near=LATE,
        fix=(
            r"balanc|\bevenly|equal|\beven\b|same (amount|work|size|length|number)|similar length",
            r"distribut|interleav|shuffle|divide|spread|deal|assign|mix|bucket|sort",
            r"BatchesOfALength|by_block|sampler|batch sampler",
            r"(length|longer|long) .*(rank|batch|sequence|recording)",
        ),
        near_fix=(r"forward|comput|Dictation|rank", r"padding"),
        accuse=(
            r"rank.*\b(late|straggl|behind)\b.*(forward|comput|length|size)",
            r"(forward|comput).*rank.*(late|behind)",
        ),
    ),
    Expected(
        name="weather",
        cause=(
            r"rank.*\b(data|input|load\w*|read\w*|fetch\w*|StationYears|read_day|sleep\w*|worker\w*|next batch)\b",
            r"\b(data|input|load\w*|read\w*|fetch\w*|StationYears|read_day|sleep\w*|worker\w*)\b.*\brank",
        ),
        near=(*LATE, *WAITS_FOR_DATA),
        fix=(
            (
                r"(speed|fast|cheap|accelerat|read|load|copy|copied|cache|move|stage|place|same)\w*.*"
                r"(data|input|load|read|disk|stor|file|local|year|shard)"
            ),
            r"prefetch|more workers|num_workers|StationYears|read_day|sleep|local (disk|copy)|workers",
            r"(balanc|distribut|shuffle|spread|divide|interleav|share)\w*.*(data|sample|year|file|rank|read)",
        ),
        near_fix=(r"data|balanc|rank",),
        accuse=(r"rank.*\b(late|straggl|behind|waits?)\b.*\b(data|input|load|read)", r"StationYears|read_day|sleep"),
    ),
    Expected(
        name="portraits",
        cause=(
            r"rank.*(SavePreview|callback|on_train_batch_end|hook|PNG|Image\.save|rank.zero)",
            r"(SavePreview|callback|on_train_batch_end|hook|PNG|Image\.save).*(rank|other process|others wait)",
        ),
        near=(*LATE, r"SavePreview|callback|on_train_batch_end|PNG|\bPIL\b"),
        fix=(
            r"SavePreview|callback",
            r"less often|every .*steps|each \d+|rarely|seldom|not (in|at|after) (each|every) step|once per|fewer times",
            r"thread|background|asynchron|another process|queue|compress",
        ),
        near_fix=(r"hook|on_train_batch_end|rank 0|PNG|PIL|Image",),
        accuse=(r"SavePreview", r"rank.*(callback|on_train_batch_end|PNG)", r"callback.*rank"),
    ),
    Expected(
        name="products",
        cause=(
            r"rank.*(garbage|\bgc\b|gc\.collect|KeepMemoryLow|collector|collections?\b)",
            r"(garbage|\bgc\b|gc\.collect|KeepMemoryLow|collector|collections?\b).*\brank",
        ),
        near=(*LATE, r"garbage|gc\.collect|\bgc\b|KeepMemoryLow"),
        fix=(
            r"gc\.(collect|freeze|disable)|\bgc\b|garbage|KeepMemoryLow|freeze",
            r"(fewer|less) (python )?objects|arrays? instead|catalog",
            r"(remove|drop|avoid|less often|not call|every .* steps).*(collect|callback)",
        ),
        near_fix=(r"on_train_batch_end|callback|objects",),
        accuse=(r"garbage|gc\.collect|KeepMemoryLow",),
    ),
    Expected(
        name="retrieval",
        cause=(
            r"ranks?\b.*\b(more|uneven|unequal|differ\w*|imbalanc\w*|larger|higher|most|than|times|apart|only|gallery)\b.*",
            r"(uneven|unequal|differ\w*|imbalanc\w*|larger|more|most)\b.*\branks?\b",
        ),
        near=(r"ranks?\b.*(memory|MiB|GiB|MB|GB|peak)", r"(memory|MiB|GiB|MB|GB|peak).*\branks?\b", r"gallery"),
        fix=(
            r"gallery|PictureRetrieval|setup\b|is_global_zero|rank.zero",
            r"(divide|shard|split|share|spread|distribut|balanc|even|move|release|free|drop|smaller)\w*.*",
            r"memory-?map|mmap|offload|disk",
        ),
        near_fix=(r"rank",),
        accuse=(
            r"ranks?\b.*\b(more|uneven|unequal|imbalanc\w*|larger|times|higher)\b.*(memory|MiB|GiB|MB|GB)",
            r"(memory|MiB|GiB|MB|GB|peak).*\b(more|uneven|unequal|imbalanc\w*|larger|times|higher)\b.*\brank",
        ),
        is_note=True,
    ),
    # --- around.py: threads, Python's memory, metrics, loggers, callbacks, hooks, validation ---
    Expected(
        name="nowcasting",
        cause=(
            r"oversubscri",
            r"too many (\S+ ){0,3}threads",
            r"more (\S+ ){0,4}threads than (\S+ ){0,3}(cores|cpus|processors)",
            r"\b20 (\S+ ){0,4}threads",
            r"threads?\b.{0,60}\b(on|for|than|share|compete|fight).{0,30}\b(2|two|cores?|cpus?)\b",
            r"set_num_threads",
        ),
        near=(r"\bthreads\b", r"context switch", r"wait\w* for (a |the )?(cpu|core)", r"scheduler"),
        fix=(
            r"set_num_threads",
            r"OMP_NUM_THREADS",
            r"MKL_NUM_THREADS",
            r"(fewer|reduce|lower|limit|decrease|less|remove|as many).{0,40}threads",
            r"threads.{0,60}(number of|to the|as many|no more|at most|cores)",
            r"cpu_threads",
        ),
        near_fix=(r"threads?", r"cores"),
        accuse=(
            r"oversubscri",
            r"too many (\S+ ){0,3}threads",
            r"more (\S+ ){0,4}threads than (\S+ ){0,3}(cores|cpus)",
            r"set_num_threads",
        ),
    ),
    Expected(
        name="film_reviews",
        cause=(r"anomaly", r"detect_anomaly"),
        near=(r"autograd.{0,40}(debug|check|trace)", r"(stack traces?|nan checks?).{0,40}(backward|operator|forward)"),
        fix=(r"anomaly",),
        near_fix=(r"debug\w* (option|mode|setting|flag)",),
    ),
    Expected(
        name="land_cover",
        cause=(
            r"gc\.collect",
            r"HostMemoryGuard",
            r"(forced|explicit|manual|requested|called|calls?|full)\b.{0,40}(garbage|\bgc\b).{0,40}",
            (
                r"(garbage|\bgc\b).{0,60}(forced|explicit|manual|by the program|called|calls|each step|every step"
                r"|per step)"
            ),
        ),
        near=(r"garbage", r"\bgc\b", r"callback", r"on_train_batch_end"),
        fix=(
            r"gc\.collect",
            (
                r"(remov|drop|delet|less often|rarely|every|stop|not call|avoid|without)\w*.{0,60}(garbage|collect"
                r"|HostMemoryGuard)"
            ),
            r"(collect|HostMemoryGuard)\w*.{0,80}(less often|rarely|every|once|remov|drop)",
        ),
        near_fix=(
            r"HostMemoryGuard",
            r"gc\.(freeze|disable|set_threshold)",
            r"garbage",
            r"every \w+ (steps|batches)",
            r"less often",
        ),
        accuse=(r"garbage", r"gc\.collect", r"\bgc\b", r"HostMemoryGuard"),
    ),
    Expected(
        name="value_learning",
        cause=(
            r"garbage[- ]collect",
            r"garbage collector",
            r"\bgc\b.{0,40}(pause|run|collection|scan|travers|time|takes)",
            r"(pause|collection|scan|travers)\w*.{0,40}\bgc\b",
            r"(live|alive|tracked) (python )?objects",
        ),
        near=(r"python objects", r"\bgc\b", r"rollout", r"Transition", r"many objects"),
        fix=(
            r"gc\.freeze",
            r"gc\.disable",
            r"gc\.set_threshold",
            r"(fewer|less|reduce).{0,40}objects",
            r"(numpy|array|tensor)s?\b.{0,60}(instead|objects|lists?)",
            r"(objects|lists?|Transition|memory|buffer|records?).{0,80}(numpy|arrays?|tensors?)",
            r"(raise|higher|larger).{0,30}threshold",
        ),
        near_fix=(r"\bgc\b", r"garbage", r"objects"),
        accuse=(r"garbage", r"\bgc\b", r"(live|alive|tracked) (python )?objects"),
    ),
    Expected(
        name="clicks",
        cause=(
            r"(metric|auroc|\bauc\b|train_auc|torchmetrics).{0,120}(each|every|per) (training )?(step|batch)",
            r"(each|every|per) (training )?(step|batch).{0,120}(metric|auroc|\bauc\b|train_auc|torchmetrics)",
            (
                r"(metric|auroc|\bauc\b|train_auc|torchmetrics).{0,120}(history|all (the )?(data|values|samples|batches"
                r"|pred)"
                r"|grow|accumulat|so far|epoch)"
            ),
            r"(BinaryAUROC|AUROC|train_auc)\S*.{0,40}(comput|takes|costs?|is|spends?)",
            r"comput\w*.{0,40}(metric|auroc|train_auc)",
            r"\.compute\(\)",
        ),
        near=(r"metric", r"auroc", r"\bauc\b", r"step\w* (\S+ )?(get|become|grow)\w* (slower|longer)"),
        fix=(
            r"on_train_epoch_end",
            r"(end of|once per|once an|per|each) (the |each |an )?epoch",
            r"(comput|metric|auroc).{0,80}(less often|rarely|every \w+ (steps|batches)|once|epoch|validation)",
            r"(binned|thresholds=|batch values?|only the batch|running)",
        ),
        near_fix=(r"metric", r"auroc", r"less often"),
        accuse=(
            r"(metric|auroc|train_auc|torchmetrics).{0,120}(each|every|per) (training )?(step|batch)",
            r"(each|every|per) (training )?(step|batch).{0,120}(metric|auroc|train_auc|torchmetrics)",
            r"(metric|auroc|train_auc).{0,80}(history|grow|accumulat)",
        ),
    ),
    Expected(
        name="music_tags",
        cause=(
            r"self\.log\b",
            r"\blog(ging)? calls?",
            r"calls? (of|to) (self\.)?log\b",
            r"\b36\d (\S+ ){0,4}(values|metrics|calls|names|keys)",
            r"(many|hundreds of|number of|volume of) (\S+ ){0,3}(logged|metrics|values|log)",
            r"log(s|ged|ging)\b.{0,40}(hundreds|\b36\d\b|many|volume|values|metrics).{0,40}(step|batch)?",
        ),
        near=(r"\blogg(ing|ed)\b", r"metrics", r"result collection"),
        fix=(
            r"(fewer|less|only|not all|reduce).{0,60}(log|metrics|values)",
            r"log\w*.{0,60}(fewer|less often|less|every|only|rarely|once|epoch)",
            r"log_dict",
            r"(mean|one tensor|together|aggregate|stack).{0,60}(log|metric|values)",
            r"on_(step|epoch)=False",
            r"per_tag",
        ),
        near_fix=(r"\blog\b", r"logging"),
        accuse=(
            r"self\.log\b.{0,80}(costs?|takes?|times|calls|values)",
            r"\blog(ging)? calls?",
            r"(many|hundreds of|volume of) (\S+ ){0,3}(logged|metrics|log)",
        ),
    ),
    Expected(
        name="energy_demand",
        cause=(
            r"JsonHistoryLogger",
            (
                r"logger.{0,120}(rewrit|re-writ|whole file|entire|all (its |the )?(history|rows|records)|json|each step"
                r"|every step|per step|log_metrics|save)"
            ),
            r"log_metrics",
            r"(rewrit|writ)\w*.{0,60}(history|log file|whole file|json)",
            r"(json|history).{0,60}(written|writ|dump|saved|rewrit).{0,60}(step|each|every|log)",
        ),
        near=(r"\blogger\b", r"writes? (a |the )?file", r"json", r"logging"),
        fix=(
            r"(append|buffer|flush_every|batch(es)? of|flush)",
            r"log_every_n_steps",
            r"(log|writ|save|flush)\w*.{0,60}(less often|rarely|every|at the end|once|finalize)",
            r"(CSVLogger|TensorBoardLogger|another logger|faster logger)",
            r"(background|thread|async)",
        ),
        near_fix=(r"logger", r"less often", r"JsonHistoryLogger"),
        accuse=(
            r"JsonHistoryLogger",
            r"\blogger\b.{0,80}(rewrit|slow|takes?|costs?|writes?)",
            r"log_metrics",
            r"rewrit",
        ),
    ),
    Expected(
        name="defects",
        cause=(r"ReconstructionGallery",),
        near=(r"callback", r"on_train_batch_end", r"zlib", r"compress"),
        fix=(
            r"every_n_batches",
            (
                r"(ReconstructionGallery|callback|hook|picture|compress)\w*.{0,120}(less often|rarely|every"
                r"|background|thread"
                r"|process|remov|cheaper|lower|faster|fewer|less work|move)"
            ),
            (
                r"(less often|rarely|every \w+ (steps|batches)|background|remove|cheaper|speed up|reduce|move|do less)"
                r".{0,120}(ReconstructionGallery|callback|hook|picture|compress)"
            ),
        ),
        near_fix=(r"ReconstructionGallery", r"callback", r"less often", r"compress", r"every \w+ (steps|batches)"),
        accuse=(r"ReconstructionGallery", r"callback.{0,60}(slow|takes?|costs?)", r"compress"),
    ),
    Expected(
        name="recommend",
        cause=(r"count_popularity", r"on_train_batch_start", r"\bCounter\b"),
        near=(r"\bhooks?\b", r"TwoTower", r"python code", r"popularity"),
        fix=(
            (
                r"(count_popularity|on_train_batch_start|hook|Counter|popularity|comput\w*|count\w*"
                r"|work)\b.{0,120}(once|epoch"
                r"|less often|rarely|every \w+ (steps|batches)|cache|out of|cheaper|faster|move|vectori[sz]e"
                r"|numpy|tensor)"
            ),
            (
                r"(once|per epoch|less often|rarely|every \w+ (steps|batches)|move|cheaper|speed up|reduce"
                r"|cache|do less)"
                r".{0,120}(count_popularity|on_train_batch_start|hook|Counter|popularity|comput|count|work)"
            ),
        ),
        near_fix=(r"count_popularity", r"on_train_batch_start", r"\bhook", r"less often", r"\bonce\b", r"cache"),
        accuse=(r"count_popularity", r"on_train_batch_start", r"\bCounter\b", r"\bhooks?\b.{0,60}(slow|takes?|costs?)"),
    ),
    Expected(
        name="latents",
        cause=(
            r"deep[- _]?cop(y|ies|ied|ying)",
            r"cop(y|ies|ied|ying)\b.{0,60}\b(model|weights|parameters|network|module|denoiser)",
            r"(model|weights|parameters|network|module|denoiser)\b.{0,60}(is|are|being)? ?cop(y|ies|ied|ying)\b",
        ),
        near=(
            r"\bema\b",
            r"moving average",
            r"average of (the )?weights",
            r"on_train_batch_end",
            r"\bhooks?\b",
            r"LatentDiffusion",
            r"cop(y|ies|ied)",
        ),
        fix=(
            r"in[- ]place",
            r"lerp",
            r"AveragedModel",
            r"swa_utils",
            r"EMAWeightAveraging",
            r"WeightAveraging",
            r"deep[- ]?copy",
            r"(without|instead of|avoid|no|stop|rather than) (\S+ ){0,3}cop(y|ies|ying)",
            r"cop(y|ies|ying)\b.{0,60}(once|less often|every|rarely)",
        ),
        near_fix=(r"on_train_batch_end", r"less often", r"\bema\b", r"every \w+ (steps|batches)", r"average"),
        accuse=(r"deep[- _]?cop(y|ies|ied|ying)", r"copies (of )?(the )?(model|weights|parameters|network|module)"),
    ),
    Expected(
        name="mixer",
        cause=(
            r"validation.{0,100}(too )?(often|frequent|every|each|\b\d+ times|runs|per epoch|interval|takes|share|%)",
            r"(often|frequent|every|each|%|takes|spent).{0,100}validat",
            r"val_check_interval",
        ),
        near=(r"validat", r"evaluat"),
        fix=(
            r"val_check_interval",
            r"check_val_every_n_epoch",
            r"limit_val_batches",
            r"validat\w*.{0,60}(less|rarely|fewer|seldom|smaller|subset|epoch)",
            r"(less|rarely|fewer|seldom|smaller|subset).{0,60}validat",
        ),
        near_fix=(r"validat",),
        accuse=(
            r"validation.{0,60}(too )?(often|frequent)",
            r"(too )?(often|frequent).{0,60}validat",
            r"val_check_interval",
            r"validation (takes|costs|runs)",
        ),
    ),
    Expected(
        name="speakers",
        cause=(
            r"checkpoint",
            r"ModelCheckpoint",
            r"every_n_train_steps",
            r"torch\.save",
            r"sav(e|es|ed|ing) (of )?(the )?(model|weights|state)",
        ),
        near=(r"\bsav(e|es|ed|ing)\b", r"writ\w+.{0,40}disk", r"\bdisk\b", r"callback"),
        fix=(
            r"every_n_train_steps",
            r"every_n_epochs",
            r"train_time_interval",
            r"checkpoint\w*.{0,80}(less|rarely|fewer|seldom|smaller|epoch|async|background|save_weights_only|every)",
            r"(less|rarely|fewer|seldom|smaller|async|background|save_weights_only).{0,80}(checkpoint|sav)",
            r"save_weights_only",
            r"AsyncCheckpointIO",
        ),
        near_fix=(r"checkpoint", r"less often", r"save_last", r"save_top_k"),
    ),
    Expected(
        name="translation",
        cause=(
            r"(other|another|second|own|user'?s?|active|running|left on|also|its) (\S+ ){0,3}profil",
            (
                r"profil\w*.{0,60}(left|active|running|is on|already|overhead|costs?|slows?|takes?|turned on|enabled"
                r"|switched on)"
            ),
            r"cProfile",
            r"torch\.profiler",
            r"PyTorchProfiler",
            r"ProfilerStep",
            r"trace_handler",
            r"AdvancedProfiler",
            r"Trainer\(.{0,20}profiler",
        ),
        near=(
            r"callback",
            r"on_train_batch_end",
            r"sys\.(setprofile|settrace|monitoring)",
            r"trac(er|ing)",
            r"profiler",
        ),
        fix=(
            (
                r"(remove|turn off|switch off|disable|stop|without|drop|leave out|only (for|a)|schedule"
                r"|limit).{0,80}profil"
            ),
            (
                r"profil\w*.{0,80}(remove|turn(ed)? off|switch(ed)? off|disable|stop|schedule|only (for|when|while)"
                r"|off\b|None)"
            ),
            r"cProfile",
        ),
        near_fix=(r"profil", r"tracing"),
        accuse=(
            r"(other|another|second|own|user'?s?) (\S+ ){0,3}profiler",
            r"cProfile",
            r"PyTorchProfiler",
            r"AdvancedProfiler",
        ),
    ),
    # --- inside.py: model and optimizer ---
    Expected(
        name="keywords",
        cause=(
            r"python loop",
            r"\bloops?\b.{0,100}(frame|time|step|element|tiny|small|operator|kernel|EnergyNormalization|smooth)",
            (
                r"(EnergyNormalization|smooth\b|front\b).{0,120}(loop|many|tiny|small|operators|calls|iterat|one by one"
                r"|dispatch)"
            ),
            r"(many|thousands of|tiny|small|short) (\S+ ){0,4}(operators|operations|ops|kernels)",
            r"(operators|operations|ops|kernels)\b.{0,60}\b(tiny|small|short|per step)",
            r"(dispatch|overhead|launch)\w*.{0,60}(operators?|operations?|ops|kernels)\b",
            r"one (frame|element|time step|value) (at a time|after)",
        ),
        near=(r"EnergyNormalization", r"\bsmooth\b", r"overhead", r"dispatch", r"\bloops?\b"),
        fix=(
            r"vectori[sz]e",
            r"(replace|avoid|without|instead of|rewrite|remove|get rid of|turn).{0,60}(loop|one by one)",
            r"(whole|all) (\S+ ){0,3}(tensor|sequence|frames|batch|elements|steps)",
            (
                r"(conv1d|convolution|matmul|matrix (product|multiplication)|cumsum|lfilter|scan|one operator"
                r"|single operator"
                r"|fewer operators|torch\.jit|fuse)"
            ),
        ),
        near_fix=(r"compile", r"loop", r"operators", r"EnergyNormalization", r"smooth\b"),
        accuse=(
            r"python loop",
            r"\bloops? (over|of)\b",
            r"(thousands of|tiny|many small) (\S+ ){0,4}(operators|operations|ops|kernels)",
            r"(EnergyNormalization|smooth\b).{0,120}(loop|many|tiny|small|operators|iterat|one by one)",
        ),
    ),
    Expected(
        name="characters",
        cause=(
            r"MyLSTM",
            r"nn\.LSTM",
            r"\blstm\b.{0,80}(by hand|hand-?written|own|step|loop|python|fused)",
            r"python loop",
            r"\bloops?\b.{0,100}(time|step|tiny|small|operator|kernel)",
            r"(recurren|cell|gates?).{0,80}(loop|step by step|python|by hand|hand-?written|operators)",
            r"(many|thousands of|tiny|small|short) (\S+ ){0,4}(operators|operations|ops|kernels)",
            r"(operators|operations|ops|kernels)\b.{0,60}\b(tiny|small|short|per step)",
            r"(dispatch|overhead|launch)\w*.{0,60}(operators?|operations?|ops|kernels)\b",
        ),
        near=(r"\blstm\b", r"\brnn\b", r"overhead", r"dispatch", r"\bloops?\b"),
        fix=(
            r"nn\.LSTM",
            r"(built-?in|fused|torch'?s) (\S+ ){0,2}(lstm|rnn|module|operator|kernel|layer)",
            r"vectori[sz]e",
            r"(one|single) (linear|matmul|matrix|product|operator)",
            r"(join|combine|concat|stack|fuse|merge)\w*.{0,60}(gates?|linear|products?|matri|operators)",
            r"(replace|avoid|without|instead of|rewrite|remove|get rid of|turn).{0,60}loop",
            r"torch\.jit",
        ),
        near_fix=(r"compile", r"loop", r"operators", r"MyLSTM", r"\blstm\b"),
        accuse=(
            r"MyLSTM",
            r"python loop",
            r"\bloops? (over|of)\b",
            r"(thousands of|tiny|many small) (\S+ ){0,4}(operators|operations|ops|kernels)",
        ),
    ),
    Expected(
        name="molecules",
        cause=(
            (
                r"AtomAttention.{0,120}(loop|many|tiny|small|operators|calls|one by one|by hand|unfused|heads|dispatch"
                r"|iterat)"
            ),
            (
                r"attention.{0,100}(loop|by hand|hand-?written|not fused|unfused|naive|head by head|one by one|per head"
                r"|explicit)"
            ),
            r"scaled_dot_product_attention",
            r"python loop",
            r"\bloops?\b.{0,100}(head|sample|molecule|batch|tiny|small|operator|kernel|AtomAttention)",
            r"(many|thousands of|tiny|small|short) (\S+ ){0,4}(operators|operations|ops|kernels)",
            r"(operators|operations|ops|kernels)\b.{0,60}\b(tiny|small|short|per step)",
            r"(dispatch|overhead|launch)\w*.{0,60}(operators?|operations?|ops|kernels)\b",
        ),
        near=(r"AtomAttention", r"attention", r"overhead", r"dispatch", r"\bloops?\b", r"softmax"),
        fix=(
            r"scaled_dot_product_attention",
            r"MultiheadAttention",
            r"fused (\S+ ){0,2}attention",
            r"vectori[sz]e",
            r"batched (matmul|matrix|product|operator)",
            r"\bbmm\b",
            r"(replace|avoid|without|instead of|rewrite|remove|get rid of|turn).{0,60}loop",
            r"(all|whole) (\S+ ){0,3}(heads|molecules|samples|batch|tensor)",
        ),
        near_fix=(r"compile", r"loop", r"operators", r"AtomAttention", r"attention"),
        accuse=(
            r"python loop",
            r"\bloops? (over|of)\b",
            r"(thousands of|tiny|many small) (\S+ ){0,4}(operators|operations|ops|kernels)",
            r"attention.{0,100}(loop|by hand|hand-?written|not fused|unfused|naive|head by head|one by one)",
        ),
    ),
    Expected(
        name="credit",
        cause=(
            r"float64",
            r"double[- ]?precision",
            r"\bdouble\b",
            r"64[- ]bit (float|precision|numbers|arithmetic)",
            r"(precision|arithmetic|floats?).{0,30}64[- ]?bit",
            r"torch\.double",
        ),
        near=(r"\bdtype", r"\bprecision\b", r"64[- ]bit"),
        fix=(
            r"float32",
            r"\.float\(\)",
            r"(single|lower|32[- ]bit) precision",
            r"32[- ]bit",
            r"bfloat16|bf16",
            r"astype",
            r"(remove|drop|without) \S*double",
        ),
        near_fix=(r"\bdtype", r"precision", r"\bcast\b", r"convert"),
        accuse=(r"float64", r"double[- ]?precision", r"\bdouble\b", r"64[- ]bit"),
    ),
    Expected(
        name="faces",
        cause=(
            r"detach",
            r"attached",
            r"discriminator.{0,160}(through|into|back to|reach|also|gradients? (of|for)).{0,60}generator",
            (
                r"generator.{0,160}(gradients?|backward).{0,120}(discard|thrown|wasted|not used|unused|never used"
                r"|cleared|zeroed"
                r"|overwritten|discriminator)"
            ),
            (
                r"backward\b.{0,100}(through|into|of) (the )?generator.{0,120}(discriminator|discard|wasted|unused"
                r"|not used|needless"
                r"|unneeded)"
            ),
            r"gradients?\b.{0,80}(that )?(no optimizer|nobody|nothing|never|not) .{0,40}(use|need|read)",
            r"gradients?\b.{0,80}(discard|thrown away|wasted|unused|zeroed|cleared|dropped).{0,40}",
        ),
        near=(
            r"generator.{0,80}(twice|two times|backward)",
            r"(twice|two).{0,40}backward",
            r"backward.{0,60}(twice|two|larger|longer|more expensive)",
            r"discriminator",
            r"(needless|unneeded|unused) gradients?",
        ),
        fix=(r"detach", r"no_grad", r"toggle_optimizer", r"requires_grad", r"stop (\S+ ){0,2}gradient"),
        near_fix=(r"generator", r"discriminator"),
        accuse=(
            r"(not|without|never|missing|un)[- ]?(\S+ )?detach",
            r"\battached",
            r"discriminator.{0,160}(through|into|back to|reach).{0,60}generator",
            r"gradients?\b.{0,80}(discard|thrown away|wasted|unused|no optimizer)",
        ),
    ),
    Expected(
        name="clothes",
        cause=(
            r"retain_graph",
            r"retain(s|ed|ing)? (\S+ ){0,3}graph",
            (
                r"(several|three|3|repeated|many|multiple|more than one|one) backward (passes|calls|s)?.{0,60}"
                r"(same|one|graph|trunk|step|batch|loss)"
            ),
            r"backward\b.{0,60}(3|three|several|multiple|many|repeated|\d+) ?(x|times|passes|calls)",
            r"backward.{0,60}(for|per|of) each (loss|task|head)",
            r"(same|one) graph.{0,60}(again|repeated|times|several|three)",
            r"(3(\.0)?|three) (\S+ ){0,2}backward",
            r"trunk.{0,100}(three times|3 times|repeated|again|each loss|several times)",
        ),
        near=(r"backward.{0,60}(dominat|longer|expensive|times (the|as|its) )", r"manual_backward"),
        fix=(
            r"sum (of )?(the |all |up )?(\S+ )?loss",
            r"(sum|add|total|combine|join|one) .{0,60}(loss|backward)",
            r"loss(es)?\b.{0,60}(sum|add|together|once|combined|one backward)",
            r"(one|single) backward",
            r"backward.{0,40}once",
            r"torch\.autograd\.(grad|backward)\(\[",
        ),
        near_fix=(r"retain_graph", r"backward"),
        accuse=(
            r"retain_graph",
            r"retain(s|ed|ing)? (\S+ ){0,3}graph",
            r"(several|three|3|repeated|multiple) backward",
            r"backward\b.{0,60}(3|three|several|multiple|repeated) ?(x|times|passes|calls)",
        ),
    ),
    Expected(
        name="articles",
        cause=(
            r"embedding.{0,160}(rows|dense|sparse|few|%|small (part|share)|optimizer|adam|update)",
            r"(rows|dense|sparse|few|optimizer|adam|update)\b.{0,160}embedding",
            r"dense (gradient|update|optimizer|adam)",
            r"SparseAdam",
            r"\barticles\b.{0,120}(rows|dense|sparse|adam|optimizer)",
            r"(rows|dense|sparse|adam|optimizer).{0,120}\barticles\b",
            r"sparse=",
        ),
        near=(r"embedding", r"optimizer", r"\badam\b"),
        fix=(
            r"sparse",
            r"SparseAdam",
            r"(only|just) (\S+ ){0,3}rows",
            r"(smaller|hash\w*|fewer rows|EmbeddingBag).{0,40}(embedding|table)",
            r"Adagrad|\bSGD\b",
        ),
        near_fix=(r"embedding", r"fused=?", r"foreach", r"accumulate_grad_batches", r"larger batch", r"optimizer"),
        accuse=(
            r"embedding.{0,160}(dense|few rows|adam)",
            r"dense (gradient|update|adam).{0,60}embedding",
            r"optimizer.{0,80}(dominat|most of|takes|costs)",
        ),
    ),
    Expected(
        name="turbines",
        cause=(
            r"on_before_optimizer_step",
            r"named_parameters",
            r"\bloops?\b.{0,80}(parameters|weights|gradients|tensors)",
            (
                r"(parameters?|weights?|gradients|tensors)\b.{0,80}(one by one|loop|each (on its own|alone)"
                r"|one at a time|one after)"
            ),
            r"(parameters?|tensors?|gradients?|weights?)\b.{0,80}(foreach|on its own|separately|individually)",
            (
                r"(foreach|norm|decay|clip\w*|limit\w*).{0,80}(each|every|per|60\d) (\S+ ){0,2}"
                r"(parameters?|tensors?|gradients?|weights?)"
            ),
            r"60\d (\S+ ){0,3}(parameters|tensors|calls|reads|times)",
        ),
        near=(
            r"\bhooks?\b",
            r"clip",
            r"gradient norm",
            r"\.item\(\)",
            r"(many|tiny|small|short) (\S+ ){0,4}(operators|operations|ops|kernels|tensors|parameters)",
            r"TurbineModel",
            r"optimizer",
        ),
        fix=(
            r"foreach",
            r"clip_grad_norm",
            r"gradient_clip_val",
            r"weight_decay",
            r"fused",
            r"(all|together|at once|one (call|operator)|vectori[sz]e).{0,60}(parameters|gradients|tensors)",
            r"(parameters|gradients|tensors)\b.{0,60}(all|together|at once|one (call|operator)|stack)",
            r"get_total_norm",
        ),
        near_fix=(r"on_before_optimizer_step", r"named_parameters", r"less often", r"\bhook\b", r"\.item\(\)", r"loop"),
        accuse=(
            r"named_parameters",
            r"(parameters?|gradients|tensors)\b.{0,60}(one by one|one at a time)",
            r"\bloops?\b.{0,80}(parameters|weights|gradients|tensors)",
        ),
    ),
    Expected(
        name="pumps",
        cause=(
            r"\bAdan\b",
            (
                r"optimizer.{0,160}(loop|one by one|each parameter|per parameter|parameter by parameter|small|tiny|many"
                r"|foreach"
                r"|fused|60\d|tensors|operators|python)"
            ),
            (
                r"(loop|one by one|each parameter|per parameter|small|tiny|many|60\d|tensors|operators"
                r"|python)\b.{0,160}optimizer"
            ),
        ),
        near=(r"optimizer", r"(tiny|small|short) (\S+ ){0,4}(operators|operations|ops|kernels|tensors)"),
        fix=(
            r"foreach",
            r"fused",
            r"torch\.optim\.\w+",
            r"AdamW?\b",
            r"compile",
            r"(all|together|at once|one (call|operator)|vectori[sz]e|flat).{0,60}(parameters|gradients|tensors)",
            r"(parameters|gradients|tensors)\b.{0,60}(all|together|at once|one (call|operator)|flat)",
        ),
        near_fix=(r"accumulate_grad_batches", r"optimizer", r"loop", r"in[- ]place"),
        accuse=(
            r"\bAdan\b",
            r"optimizer.{0,100}(loop|one by one|each parameter|per parameter|small|tiny|takes|costs|dominat)",
        ),
    ),
    Expected(
        name="species",
        cause=(
            (
                r"optimizer.{0,120}(dominat|%|takes|most|share|more than|step|larger|longer|expensive|costs?|as long"
                r"|update)"
            ),
            r"(dominat|%|takes|most|spent|costs?|share|update)\w*.{0,120}\boptimizer",
            r"\badamw?\b.{0,100}(%|takes|dominat|costs?|every|each|parameters|weights)",
            r"(updat\w+) (of )?(the |all )?(\S+ )?(weights|parameters)",
        ),
        near=(r"optimizer", r"\badamw?\b", r"small(er)? batch", r"batch (size )?(is )?(too )?small"),
        fix=(
            r"accumulate_grad_batches",
            r"accumulat",
            r"(larger|bigger|increase|raise|greater|twice the|more samples).{0,40}batch",
            r"batch.{0,40}(larger|bigger|increase|raise)",
            r"fused",
            r"fewer (optimizer )?(steps|updates)",
        ),
        near_fix=(r"foreach", r"\bSGD\b", r"optimizer", r"head\b"),
        accuse=(
            r"optimizer.{0,80}(dominat|takes|most of|costs|longer|expensive)",
            r"(dominat|most|spent)\w*.{0,60}\boptimizer",
        ),
    ),
    # Pictures are decoded in the dataset, in the main process.
    Expected(
        name="leaf_photos",
        cause=(
            r"decod|jpe?g|to_pixels|\bPIL\b|pillow|Image\.(open|convert|resize)|convert\b.*image|resiz",
            r"LeafDataset.*__getitem__|__getitem__.*LeafDataset",
            r"(no|without|0) (loader |data ?loader )?workers?|num_workers ?(=|is) ?0",
        ),
        near=(r"input[- ]bound|wait\w* (for|on) (the )?(data|input|batch|loader)|data ?load|dataset|__getitem__",),
        fix=(
            r"num_workers|\bworkers?\b",
            (
                r"decod\w* (once|ahead|before|offline|beforehand)|pre-?decod|"
                r"pre-?process|cach\w+|store\w* .*(decoded|array|tensor)"
            ),
            r"(faster|quicker) (jpeg )?decod|turbo|torchvision\.io|draft",
        ),
        near_fix=(r"decod|resiz|to_pixels|__getitem__|dataset",),
        accuse=(r"decod|jpe?g|to_pixels|\bPIL\b|pillow", r"input[- ]bound"),
    ),
    # A callback saves a contact sheet after every step.
    Expected(
        name="tile_compression",
        cause=(
            r"ReconstructionSheet",
            r"callback.*on_train_batch_end|on_train_batch_end.*callback",
            r"(sav|writ|encod|compress)\w* .*(png|image|picture|sheet)|Image\.save|\bpng\b",
        ),
        near=(r"callback|on_train_batch_end|hook|\bPIL\b|\bsave\b",),
        fix=(
            r"ReconstructionSheet",
            (
                r"callback.*(every|less|rare|seldom|fewer|\bN\b|interval|"
                r"end of (the|each) epoch|thread|background|remove|cheap)"
            ),
            (
                r"(every|once (in|per)|less often|rarely|fewer|only|"
                r"interval).*(callback|on_train_batch_end|image|png|sav)|every (\d+|N|few) (steps|batches)"
            ),
            r"(save|write|encode)\w* .*(less|every|rare|fewer|thread|background|process)",
        ),
        near_fix=(r"callback|on_train_batch_end|sav(e|ing)|image",),
        accuse=(r"ReconstructionSheet|\bpng\b", r"callback.*on_train_batch_end|on_train_batch_end.*callback"),
    ),
    # Forward hooks take statistics of each ReLU in each step.
    Expected(
        name="texture_network",
        cause=(
            r"(forward|module|registered|user)[ _-]?hooks?",
            r"\bhooks?\b.*(layer|module|ReLU|activation|record|forward)",
            r"ActivationStatistics|\brecord(er)?\b",
        ),
        near=(r"\bhooks?\b|histc|statistic|\brecord\b",),
        fix=(
            r"(remov|detach|unregister|drop|skip|limit|disable|run|call|register)\w* .*hooks?",
            r"hooks?.*(remov|every|less|rare|only|fewer|sampl|cheap|interval|\bN\b)",
            r"statistic\w*.*(every|less|rare|only|fewer|sampl|subset|cheap)",
            r"ActivationStatistics|\brecord(er)?\b",
        ),
        near_fix=(r"hook|statistic|histc|\.item\(",),
        accuse=(r"(forward|module|registered|user)[ _-]?hooks?", r"ActivationStatistics|\brecorder\b|histc"),
    ),
    # Targets are assigned in Python lists, box by box, in training_step.
    Expected(
        name="pedestrians",
        cause=(
            r"\bassign\b|\biou\b",
            r"python.*(loop|list|per[- ]sample|element|training_step|code|lines?)|(loop|list)s?.*python",
            (
                r"(time|spent|spend|cost|take).*\btraining_step\b.*(not|"
                r"outside|no) .*operators?|pure[- ]python|interpreter"
            ),
        ),
        near=(r"training_step|\bpython\b|tolist|host[- ]bound|overhead",),
        fix=(
            (
                r"vectori[sz]|tensor (op|code)|batched|whole (batch|"
                r"tensor)|broadcast|torch (op|func)|instead of .*(loop|list)"
            ),
            r"(replace|move|avoid|rewrite|write)\w* .*(python|loop|assign|iou|tolist|list)",
            (
                r"(dataset|collate|worker).*(target|assign|work)|(target|"
                r"assign|work|move)\w*.*(to|in|into) .*(dataset|collate|worker)"
            ),
            r"box_iou",
        ),
        near_fix=(r"\bassign\b|\biou\b|\bpython\b|training_step|tolist|\bloop",),
        accuse=(r"\biou\b|tolist|python.*loop|loop.*python|pure[- ]python|interpreter", r"\bassign\b.*\d\d ?%"),
    ),
    # The collate function makes a tensor per token.
    Expected(
        name="masked_sentences",
        cause=(r"collat", r"MaskingCollator"),
        near=(
            (
                r"input[- ]bound|wait\w* (for|on) (the )?(data|input|batch|"
                r"loader)|data ?load|main process|num_workers|workers?\b"
            ),
        ),
        fix=(
            r"collat",
            r"MaskingCollator",
            r"vectori[sz]|whole batch|batch(ed)? (tensor|operat)|num_workers|\bworkers?\b",
        ),
        near_fix=(r"data ?load|python|\bloop|torch\.tensor",),
        accuse=(r"collat\w* (takes|is|costs|spends|function)|slow.*collat|MaskingCollator|input[- ]bound",),
    ),
    # Layer norm and GELU are written out as elementwise operators.
    Expected(
        name="novel_characters",
        cause=(
            r"NewGELU|\bLayerNorm\b|layer ?norm|gelu",
            r"element-?wise|point-?wise|un-?fused|hand-?written|written out|naive|many (small |separate )?operators",
        ),
        near=(
            (
                r"\bact\b|aten::(pow|tanh|mul|add|div|mean|sqrt)|\bpow\b|"
                r"\btanh\b|activation|memory[- ]bound|CharacterBlock"
            ),
        ),
        fix=(
            (
                r"nn\.(functional\.)?(GELU|LayerNorm)|functional\.(gelu|"
                r"layer_norm)|F\.(gelu|layer_norm)|torch\.compile|fus(e|ed|ing)"
            ),
            r"(built-?in|native|torch'?s?( own)?) .*(gelu|layer ?norm|module|operator|activation|function)",
        ),
        near_fix=(r"NewGELU|LayerNorm|layer ?norm|gelu|element-?wise|\bpow\b|x ?\* ?x",),
        accuse=(r"NewGELU|element-?wise|un-?fused|hand-?written|written out|naive|aten::pow",),
    ),
    # The loss of each of 160 topics is logged in each step.
    Expected(
        name="news_topics",
        cause=(
            r"(self\.)?\blog(_dict)?\b.*(call|value|metric|\d{2,}|times|often|each|every|per step|name|key)",
            r"logg(ing|ed)|(\d{2,}|many|hundreds).*(logged|metrics|self\.log|log calls)|topic_",
        ),
        near=(r"metrics?|self\.log|\blog\b|result ?collection",),
        fix=(
            r"(log|record)\w* .*(fewer|less|rare|every|once|only|mean|one |epoch|together|aggregat|vector|\bN\b)",
            (
                r"(fewer|less|batch|combine|aggregate|average|group|stack|"
                r"drop|remove|reduce|collect|gather)\w* .*(log|metric|value)"
            ),
            r"log_dict|on_epoch|on_step|\bTensorBoard|histogram",
        ),
        near_fix=(r"self\.log|\blog(ging|ged)?\b|metric",),
        accuse=(
            r"(\d{2,}|many|hundreds).*(logged|metrics|log calls|calls of self\.log)|logging (takes|costs|is)|topic_",
        ),
    ),
    # One worker fetches clips from a file server, with moderate work.
    Expected(
        name="keyword_clips",
        cause=(
            r"(one|single|lone|1|only|too few|few|more|fewer|not enough|enough)\b.{0,30}workers?",
            (
                r"workers? .*(cannot|can't|do(es)? not|don't|not) (keep|"
                r"deliver|suffice|enough)|num_workers ?(=|is|of|:) ?1"
            ),
            r"workers? .*(slower|behind|busy all|always busy|the limit|never idle)",
            r"\breceive\b|RemoteKeywords|time\.sleep|\bsleep",
        ),
        near=(
            (
                r"input[- ]bound|wait\w* (for|on) (the )?(data|input|"
                r"batch|loader|worker)|data ?load|__getitem__|\bworkers?\b"
            ),
        ),
        fix=(
            r"num_workers|(more|add|raise|increase|several|additional|second|[2-9]) .*workers?|workers? (to|from) \d",
            r"\breceive\b.*(cache|local|ahead|parallel|thread|async|batch)|cach(e|ing)|in parallel|asynchron",
        ),
        near_fix=(r"\bworkers?\b|__getitem__|\breceive\b|prefetch|dataset",),
        accuse=(
            (
                r"input[- ]bound|(too few|not enough|more|one|single) workers?|"
                r"wait\w* (for|on) (the )?(data|input|batch|loader)"
            ),
        ),
    ),
    # Utterances are padded to the longest of the data set.
    Expected(
        name="utterances",
        cause=(
            r"\bpad",
            r"(unused|wasted|empty|masked|zero|useless) (frames|positions|elements|values|steps|part|time)",
        ),
        near=(r"lengths?\b|\bmask|longest|zeros",),
        fix=(
            (
                r"\bpad\w*|bucket|(sort|group|batch)\w* .*(length|similar)|"
                r"pack(ed)?\b|nested|longest (of|in) (the|each|its) batch"
            ),
        ),
        near_fix=(r"length|collat|shorter|trim|crop|mask",),
        accuse=(
            r"([4-9]\d|100) ?%[^.]{0,60}\bpad|\bpad\w*[^.]{0,60}([4-9]\d|100) ?%",
            r"longest (utterance |sample |sequence |item )?(of|in) (the |all )?(data|training)",
        ),
    ),
    # An archive is opened and decompressed every ten batches.
    Expected(
        name="bird_calls",
        cause=(
            r"open_evening|BirdArchive|np\.load|numpy\.load|\bnpz\b|(de|un)compress|unzip|\bzip|zlib",
            r"(every|each|once (in|per|every)) (about |some |~)?(\d+|ten|ninth|tenth|few|N)\w*\b.*(batch|step|item)",
            (
                r"(periodic|regular|recurring|repeated|occasional|(some|few|"
                r"single|\d+) (slow |of the )?(batch|item|call)\w*).*(slow|long|late|wait|stall|spik|batch)"
            ),
            r"(slow|long|late|stall|spik)\w*.*(every|periodic|regular|recurring|each \d+)",
            r"shard|archive|\bopen(s|ed|ing)?\b.*file|file.*\bopen",
        ),
        near=(
            (
                r"input[- ]bound|wait\w* (for|on) (the )?(data|input|batch|"
                r"loader)|data ?load|__getitem__|main process|workers?\b"
            ),
        ),
        fix=(
            (
                r"(open|load|read|unpack|decompress|prefetch|fetch)\w* .*(ahead|"
                r"before|background|next|early|advance|once|thread|in time)"
            ),
            (
                r"uncompressed|memory[- ]map|mmap|(smaller|split|more) (shard|"
                r"archive|file)|num_workers|\bworkers?\b|prefetch"
            ),
            r"without compression|npy\b|keep .*open",
        ),
        near_fix=(r"open_evening|np\.load|npz|decompress|shard|archive|__getitem__|dataset|file",),
    ),
    # The loader's workers start again in each short epoch.
    Expected(
        name="shop_sales",
        cause=(
            r"(re-?start|re-?creat|start|spawn|fork|launch)\w*.*(worker|process)",
            r"workers?.*(re-?start|re-?creat|start|spawn|fork|launch|each epoch|every epoch|persist)",
            r"persistent_workers",
        ),
        near=(
            r"(start|begin|first batch|change|end|between)\w* .*epochs?|short epochs?|epochs?.*(short|start|boundar)",
            r"input[- ]bound|wait\w* (for|on) (the )?(data|input|batch|loader|worker)",
        ),
        fix=(r"persistent_workers|keep .*workers|workers? .*(alive|persist|between epochs|over epochs)",),
        near_fix=(r"longer epochs|fewer epochs|num_workers|\bworkers?\b",),
        accuse=(
            (
                r"(re-?start|re-?creat|spawn|fork)\w*.*worker|"
                r"workers?.*(re-?start|re-?creat|each epoch|every epoch)"
            ),
        ),
    ),
    # The area under the curve of all payments so far is computed in each step.
    Expected(
        name="card_payments",
        cause=(
            r"auroc|\.compute\b|\bcompute\(|torchmetrics|roc\b",
            r"metrics?\b.*(comput|each step|every step|grow|per step|tak|cost|updat|slow)|(comput|updat)\w* .*metric",
            r"(all|everything|whole|entire) .*(so far|seen|history|previous)",
        ),
        near=(r"\bmetrics?\b|\bsort\b|aten::sort|grow(s|ing)?|slows? down|slower",),
        fix=(
            (
                r"(comput|evaluat)\w*.*(epoch|less|rare|every|once|\bN\b|"
                r"validation|fewer)|(epoch|once|less often).*(comput|metric|auroc)"
            ),
            r"thresholds|binned|on_epoch|on_(train_)?epoch_end|log (the )?(metric|auroc|object)",
            r"(only )?update\b.*(each|every|per) (step|batch)",
        ),
        near_fix=(r"metric|auroc|\bcompute\(|\bsort\b",),
        accuse=(r"auroc.{0,40}comput|comput\w*.{0,40}auroc|aten::sort", r"(slows down|gets slower|grows? with)"),
    ),
    # The collector is called after each step, beside many live objects.
    Expected(
        name="shopping_baskets",
        cause=(r"gc\.collect|garbage|\bgc\b|collector|collections? (of|by)",),
        near=(r"on_train_batch_end|live (python )?objects|(many|\d+) .*objects|\bhook\b",),
        fix=(
            r"gc\.collect|garbage|\bgc\b|collector",
            r"(fewer|less often|rare|remove|drop|every).*collect|collect.*(fewer|less|rare|every|epoch)",
        ),
        near_fix=(r"on_train_batch_end|objects",),
    ),
    # A logger writes its whole history again at each record.
    Expected(
        name="turbine_output",
        cause=(
            r"JsonHistory|log_metrics|write_text|json",
            (
                r"logger.*(rewrit|writ|whole|entire|grow|again|slow|tak|cost|"
                r"spen|file)|(rewrit|writ)\w* .*(whole|entire|again|file).*"
            ),
            r"(file|history|record)s?.*(grow|rewrit|whole)",
        ),
        near=(r"logger|logging|\blog\b|grow(s|ing)?|slows? down|slower|writ(es|ing)",),
        fix=(
            r"append|(one|a|single|new) (line|record|row)|jsonl|json lines|rewrit|incremental",
            (
                r"log_every_n_steps|(log|write|flush|save)\w* .*(less|rare|every|"
                r"fewer|background|thread|buffer|end)|(less|rare|fewer).*(log|writ)"
            ),
            r"(other|another|different|csv|tensorboard).*logger|JsonHistory|log_metrics",
        ),
        near_fix=(r"logger|logging|json|writ",),
        accuse=(
            r"logger.*(rewrit|whole|entire|grow|again)|rewrit|(slows down|gets slower|grows with)",
            r"write_text|JsonHistory.*(\d\d) ?%",
        ),
    ),
    # Data from numpy is of 64 bits, and so the model was made.
    Expected(
        name="power_load",
        cause=(r"float ?64|\bdoubles?\b(?! the)|64[- ]bits?|fp64|f64",),
        near=(r"precision|dtype|data type",),
        fix=(
            (
                r"float ?32|single precision|\.float\(\)|32[- ]bits?|"
                r"fp32|(remove|drop|without|avoid).*\.?double|np\.float32"
            ),
        ),
        near_fix=(r"precision|dtype|bf16|bfloat16|mixed|double|float ?64",),
        accuse=(r"float ?64|double precision|64[- ]bits?|fp64|\bdoubles?\b",),
    ),
    # Sixteen threads on two cores.
    Expected(
        name="cart_policy",
        cause=(
            (
                r"(16|sixteen|too many|more|many) threads?|over-?subscri|"
                r"threads?.*(\b16\b|too many|over-?subscri|(than|on|for|with|share) .*cores?)"
            ),
            r"over-?subscri|set_num_threads|num_threads",
        ),
        near=(r"threads?\b|(wait|share|compet|contend)\w*.*(cores?|cpus?)|context switch|synchroni[sz]|barrier",),
        fix=(
            (
                r"set_num_threads|num_threads|(fewer|less|reduce|lower|limit|"
                r"as many|one|two|2|1)\b.*threads?|threads? .*(cores?|2|two)"
            ),
        ),
        near_fix=(r"threads?\b|cores?\b",),
        accuse=(r"over-?subscri|too many threads|more threads than|16 threads|set_num_threads",),
    ),
    # detect_anomaly=True.
    Expected(
        name="robot_steps",
        cause=(r"anomaly",),
        near=(r"debug|\bnan\b|stack traces?|traceback",),
        fix=(r"anomaly",),
        near_fix=(r"debug|\bnan\b",),
    ),
    # The readout takes the molecules of a batch one by one.
    Expected(
        name="solubility",
        cause=(
            r"\bpool\b|MoleculeNet\.pool",
            r"(many|\d{3,}|thousands|tiny|small|short|little).*(operator|op|kernel|call|operation)s?\b",
            (
                r"(python )?loop|one (by|at a time)|per[- ](sample|molecule|"
                r"graph|item)|dispatch|overhead[- ]bound|operator overhead"
            ),
        ),
        near=(
            (
                r"overhead|host[- ]bound|\bpython\b|MoleculeNet|"
                r"nonzero|boolean (index|mask)|aten::(index|nonzero|eq)"
            ),
        ),
        fix=(
            (
                r"vectori[sz]|batch(ed|ing)?\b.*(op|loop|call|whole|one)|(one|"
                r"single|fewer|larger|whole) (\w+ )?(op|call|tensor|batch)"
            ),
            (
                r"scatter|index_add|segment|bincount|global_.*pool|torch\.compile|"
                r"\bcompile\b|(replace|avoid|remove|instead of)\w* .*loop"
            ),
            r"pad(ded)? .*(batch|molecule)|nested",
        ),
        near_fix=(r"\bpool\b|\bloop|tiny|small|operators?|python|MoleculeNet",),
        accuse=(
            r"\bpool\b.*\d\d ?%|(python )?loop\b|one by one|per[- ](molecule|graph)|overhead[- ]bound|aten::nonzero",
        ),
    ),
    # The average of the weights copies the network several times in each step.
    Expected(
        name="digit_diffusion",
        cause=(
            r"deep-?cop|\bcop(y|ies|ied|ying)\b.*(model|network|weight|parameter|state|denoiser|module|each|every)",
            r"state_dict|\bEMA\b|(moving |weight |exponential )average|averag\w* .*(weight|parameter|model)",
            r"(model|network|weight|parameter|denoiser|state)s?.*\b(is|are|was|were) copied",
        ),
        near=(r"on_train_batch_end|\bcop(y|ies|ied|ying)\b|\bhook\b",),
        fix=(
            (
                r"in[- ]place|lerp|foreach|(without|avoid|remove|instead of|"
                r"no)\b.*(cop|deepcopy)|AveragedModel|swa_utils|EMAWeightAveraging"
            ),
            (
                r"(every|less often|rare|fewer|once|only).*(step|cop|averag|updat)|"
                r"(cop|averag|updat)\w* .*(every|less|rare|fewer|\bN\b|once)"
            ),
        ),
        near_fix=(r"deep-?cop|\bcop(y|ies|ied|ying)\b|state_dict|\bEMA\b|averag|on_train_batch_end",),
        accuse=(r"deep-?cop|state_dict|\bcop(y|ies|ied|ying)\b.*(model|network|weight|parameter|state|denoiser)",),
    ),
    # Fifteen batches of validation after every five of training.
    Expected(
        name="weather_maps",
        cause=(r"validat|val_check_interval|\bval(_loop)?\b|evaluat",),
        near=(r"between (the )?steps|outside (of )?(the )?(training )?steps?",),
        fix=(
            (
                r"val_check_interval|check_val_every_n_epoch|limit_val_batches|"
                r"(less|rare|fewer|smaller|seldom|every)\w*.*(validat|evaluat)"
            ),
            r"validat\w*.*(less|rare|fewer|smaller|seldom|every|once|subset|larger batch)",
        ),
        near_fix=(r"validat|evaluat",),
        accuse=(
            r"(validat|evaluat)\w*.*(([2-9]\d)(\.\d+)? ?%|too often|frequent|every \d|most)|val_check_interval",
            r"(too often|frequent)\w*.*validat",
        ),
    ),
    # A checkpoint every two steps.
    Expected(
        name="plant_dynamics",
        cause=(
            r"check-?point",
            r"every_n_train_steps|torch\.save|sav(es|ed|ing)\b.*(model|state|weight|every|each|disk)",
        ),
        near=(r"\bsav(e|es|ed|ing)\b|callback|disk|writ(es|ing|ten)|on_train_batch_end",),
        fix=(
            r"every_n_train_steps|every_n_epochs|train_time_interval|save_top_k|save_weights_only|async\w*",
            (
                r"(less|rare|fewer|seldom)\w*.*(check-?point|sav)|(check-?point|"
                r"sav)\w*.*(less|rare|fewer|seldom|every|async|background|weights only)"
            ),
        ),
        near_fix=(r"check-?point|\bsav(e|ing)\b",),
        accuse=(
            r"check-?point\w*.*(([2-9]\d)(\.\d+)? ?%|too often|frequent|every (2|two)\b|each step)",
            r"(too often|frequent)\w*.*check-?point",
        ),
    ),
    # The script has torch's profiler on, with stacks and shapes.
    Expected(
        name="lander_policy",
        cause=(
            (
                r"(torch|pytorch|autograd|kineto|another|other|second|own|user|"
                r"script)\W*('s)?.*profil|profiler.*(on|run|activ|record|left|stack|cost|tak)"
            ),
            r"with_stack|record_shapes|trace_handler|export_chrome_trace|TracedPolicy|\btrace\b",
        ),
        near=(r"profil|on_train_batch_end|tracing",),
        fix=(
            (
                r"(remove|turn off|disable|stop|drop|limit|end|switch off|without|"
                r"shorten|close|take out)\b.*(profil|with_stack|record_shapes|trac)"
            ),
            (
                r"profil\w*.*(off|remove|only|few|once|schedule|repeat|disable|"
                r"less)|with_stack ?= ?False|repeat ?=|with_stack|record_shapes"
            ),
        ),
        near_fix=(r"profil|\btrace\b|tracing|on_train_batch_end",),
        accuse=(
            (
                r"torch\.profiler|(another|second|other|user'?s?|"
                r"script'?s?) profiler|with_stack|record_shapes|trace_handler"
            ),
        ),
    ),
    # The target network runs with gradients, and the loss goes back through it.
    Expected(
        name="arcade",
        cause=(
            (
                r"(target|teacher|second|other|frozen|following|bellman).{0,120}(no_grad|gradient|graph|backward"
                r"|attached)"
            ),
            r"(gradient|graph|backward|attached|no_grad|detach).{0,120}(target|teacher|bellman|frozen)",
            (
                r"gradients?.{0,80}(that )?(no optimizer|nothing|nobody|never|not|none).{0,40}(use|need|update"
                r"|step|read|appl)"
            ),
            r"(unneeded|unused|needless|unnecessary|wasted?).{0,40}(graph|gradient|backward|autograd)",
            r"(no|not|outside|without|any) (any )?optimi[sz]er.{0,80}gradient",
            r"parameters.{0,60}(not|no|outside|without).{0,30}optimi[sz]er",
        ),
        near=(r"\bbackward\b", r"self\.target", r"bellman_targets", r"autograd"),
        fix=(r"no_grad", r"inference_mode", r"detach", r"requires_grad"),
        near_fix=(r"bellman_targets", r"\btarget\b", r"fewer gradients"),
        accuse=(
            (
                r"gradients?.{0,80}(that )?(no optimizer|nothing|nobody|never|not|none).{0,40}(use|need|update"
                r"|step|read|appl)"
            ),
            r"(unneeded|unused|needless|unnecessary|wasted?).{0,40}(graph|gradient|backward|autograd)",
            r"no_grad|detach",
            r"(no|not|outside|without) (any )?optimi[sz]er.{0,80}gradient",
        ),
    ),
    # Two backward passes over the same trunk, with retain_graph.
    Expected(
        name="road_scenes",
        cause=(
            r"retain_graph|retain(s|ed|ing)? (the |its )?graph|graph.{0,30}(kept|retained)",
            r"\b(two|second|twice|several|multiple|double|more than one|another|repeated|extra)\b.{0,60}backward",
            r"\b2(\.0)? (calls of |calls to |times )?(self\.)?(manual_)?backward",
            (
                r"backward.{0,80}\b(twice|two|second|several|multiple|repeated|more than once|again|2 times"
                r"|2(\.0)? (calls|passes))\b"
            ),
            r"(same|one|shared) (graph|trunk|part).{0,60}(twice|again|two)",
        ),
        near=(r"\bbackward\b", r"manual_backward"),
        fix=(
            r"(sum|add|combine|join|merge|total|plus).{0,60}loss",
            r"loss(es)?.{0,60}(sum|add|combine|together|once|at once|joint|merge)",
            r"(one|single|1) (call of |call to )?(manual_)?backward",
            r"backward.{0,50}(once|only one|one time)",
            r"(without|remove|drop|no).{0,20}retain_graph",
        ),
        near_fix=(r"backward", r"retain_graph", r"fewer backward"),
        accuse=(
            r"retain_graph",
            r"(two|second|twice|several|multiple|double|more than one)\b.{0,60}backward",
            r"backward.{0,80}(twice|two|second|several|multiple|more than once)",
        ),
    ),
    # Adam touches all 60,000 rows, a batch reads about 5,000.
    Expected(
        name="catalogue",
        cause=(
            (
                r"(embedding|table|items).{0,160}(few|dense|all (its |the )?rows|every row|unused|sparse|only"
                r"|not (read|used|looked))"
            ),
            r"(few|dense|all (its |the )?rows|every row|unused|sparse|only).{0,160}(embedding|table|items)",
            r"(dense|full).{0,40}(gradient|update|adam).{0,80}(rows|embedding|table)",
            r"rows?.{0,80}(not|without|zero|no).{0,30}(gradient|used|read)",
        ),
        near=(r"optimi[sz]er", r"\badam\b", r"embedding"),
        fix=(
            r"sparse",
            r"only (the |those )?rows",
            r"rows? (that|which) (a |the )?batch",
            r"(row|lazy).{0,20}(update|adam)",
        ),
        near_fix=(r"fused", r"foreach", r"smaller (embedding|table)", r"\bsgd\b", r"embedding"),
        accuse=(
            r"(embedding|table).{0,120}(dense|all (its |the )?rows|every row|unused rows)",
            r"dense.{0,60}(gradient|update).{0,60}(embedding|rows|table)",
            r"\badam\b.{0,60}(of|is|takes).{0,40}%",
        ),
    ),
    # An own optimizer that loops over some 360 small parameters.
    Expected(
        name="house_prices",
        cause=(
            (
                r"(optimi[sz]er|adabelief|\bstep\b).{0,160}(loop|one by one|one at a time|each (parameter"
                r"|tensor)|per (parameter|tensor)"
                r"|parameter by parameter|tensor by tensor|small (operat|kernel|op|tensor|parameter)|tiny|many)"
            ),
            (
                r"(loop|one by one|each parameter|per parameter|small (operat|kernel|op|tensor|parameter)|tiny"
                r"|many).{0,160}"
                r"(optimi[sz]er|adabelief)"
            ),
        ),
        near=(r"optimi[sz]er", r"adabelief", r"(small|tiny) (operat|op|kernel)", r"python"),
        fix=(
            r"foreach",
            r"fused",
            r"flat(ten)?",
            r"(all|many|several) (parameters|tensors).{0,40}(at once|together|in one)",
            r"(one|single) (call|tensor|operation|vector|buffer)",
            r"vectori[sz]",
            r"torch'?s? own|built-?in|torch\.optim",
        ),
        near_fix=(r"optimi[sz]er", r"adabelief", r"compile", r"fewer (parameters|tensors|calls|operat)", r"loop"),
        accuse=(
            (
                r"(optimi[sz]er|adabelief).{0,120}(loop|one by one|each parameter|per parameter"
                r"|parameter by parameter)"
            ),
            r"(loop|one by one|each parameter|per parameter).{0,120}(optimi[sz]er|adabelief)",
        ),
    ),
    # AdamW's default form on two matrices of 4.6 million numbers.
    Expected(
        name="cells",
        cause=(
            (
                r"(optimi[sz]er|adamw?).{0,160}(fused|foreach|for-?loop|single.tensor|unfused|slow form|\bform\b"
                r"|implementation"
                r"|variant|several passes|memory (traffic|bandwidth)|elementwise)"
            ),
            r"(fused|foreach|unfused|single.tensor|implementation).{0,120}(optimi[sz]er|adamw?)",
            r"(optimi[sz]er|adamw?).{0,80}(large|few|huge|big).{0,40}(parameter|tensor|matri|weight)",
        ),
        near=(r"optimi[sz]er", r"adamw?"),
        fix=(r"fused",),
        near_fix=(r"foreach", r"\bsgd\b", r"(other|cheaper|lighter) optimi[sz]er", r"accumulate", r"compile"),
        accuse=(
            r"(not|un)\W?fused|without fused|fused=False|for-?loop|single.tensor|foreach",
            r"slow (form|implementation|variant) of (the )?(optimi[sz]er|adamw?)",
        ),
    ),
    # The table of 8,192 positions is made in each forward.
    Expected(
        name="letters",
        cause=(
            (
                r"(sinusoid|positional|positions?\b|\bpe\b|\btable|\bconstant|same (value|result|tensor"
                r"|table)).{0,160}"
                r"(each|every|again|rebuil[dt]|recomput|remade|made|anew|repeat|per (step|forward|call)|once)"
            ),
            (
                r"(rebuil[dt]|recomput|remade|made (again|anew|in each|each)|repeat|again|each (step|forward"
                r"|time)).{0,160}"
                r"(sinusoid|positional|position|\bpe\b|table|constant)"
            ),
            r"(does|do|did) not (change|depend).{0,120}(each|every|again|recomput|made|forward)",
            r"(each|every|again|recomput).{0,120}(does|do|did) not (change|depend)",
        ),
        near=(r"sinusoids", r"PositionalEncoding", r"\bsin\b|\bcos\b", r"positions"),
        fix=(
            r"register_buffer|\bbuffer",
            r"\bonce\b",
            r"cache|lru_cache|precomput|store|keep (it|the)",
            r"__init__|constructor|setup|outside (of )?(the )?(step|forward)|before (the )?training",
        ),
        near_fix=(r"sinusoids", r"PositionalEncoding", r"(shorter|only).{0,30}(positions|length|table)", r"max_len"),
    ),
    # The feature maps of all steps stay in a deque of the module.
    Expected(
        name="shop_photos",
        cause=(
            (
                r"(grow|leak|accumulat|kept|keeps|retain|pile|more).{0,160}(\bseen\b|deque|list|append|Contrast"
                r"|tensors)"
            ),
            r"(\bseen\b|deque|list|append|tensors).{0,160}(grow|leak|accumulat|kept|keeps|retain|pile|never)",
        ),
        near=(r"(memory|rss|heap).{0,80}(grow|leak|ris|increas)", r"(grow|leak|ris|increas).{0,80}(memory|rss)"),
        fix=(
            r"maxlen|bounded?\b|limit (the|its)|fixed (size|length)",
            r"clear|\bpop\b|empt(y|ied)|drop|remove|free|delete|release|discard",
            r"(keep|append|store|hold).{0,60}(only|last|few|fewer|recent|number|scalar|mean|float|item|less|not)",
            r"\.item\(\)|float\(",
        ),
        near_fix=(r"\bseen\b", r"append", r"deque", r"grow", r"snapshot"),
        accuse=(
            r"(grow|leak).{0,120}(\bseen\b|deque|list|append|tensors|step)",
            r"(\bseen\b|deque).{0,120}(grow|leak|accumulat)",
            r"(memory|rss|heap).{0,80}(grow|leak)",
        ),
    ),
    # The sum of a loss that no backward reaches holds the graphs of all steps.
    Expected(
        name="satellite_tiles",
        cause=(
            (
                r"(graph|autograd|grad_fn|saved (tensor|activation)|not detached|undetached|without detach)"
                r".{0,200}(total_edge_loss|edge_loss|kept|keep|grow|leak|accumulat|retain|held|hold|stay|alive"
                r"|each step|all steps)"
            ),
            (
                r"(total_edge_loss|edge_loss|kept|keep|grow|leak|accumulat|retain|held|hold|stay|alive).{0,200}"
                r"(graph|autograd|grad_fn|saved (tensor|activation)|attached|not detached|undetached|without detach)"
            ),
        ),
        near=(
            r"(memory|rss|heap).{0,80}(grow|leak|ris|increas)",
            r"(grow|leak|ris|increas).{0,80}(memory|rss|heap|tensor)",
            r"total_edge_loss",
        ),
        fix=(
            r"detach",
            r"\.item\(\)|\bitem\(|float\(",
            r"no_grad",
            r"(plain|python) (number|float)",
            r"without (its|the) graph",
        ),
        near_fix=(r"total_edge_loss", r"edge_loss", r"clear|release|drop|reset", r"grow"),
    ),
    # The dataset of each worker keeps what it decoded.
    Expected(
        name="wind_farms",
        cause=(
            r"worker.{0,200}(grow|leak|cache|unpacked|keep|kept|accumulat|more memory|ris)",
            r"(grow|leak|cache|unpacked|keep|kept|accumulat|ris).{0,200}worker",
            r"(dataset|Records|unpacked).{0,120}(grow|leak|cache|keeps|accumulat)",
        ),
        near=(r"(memory|rss|pss).{0,80}(grow|leak|ris|increas)", r"(grow|leak|ris|increas).{0,80}(memory|rss|pss)"),
        fix=(
            r"cache|unpacked|memo",
            r"(bound|limit|lru|clear|empty|evict|drop|remove).{0,60}(dataset|dict|store|item|worker|entries|size)?",
            r"(dataset|__getitem__).{0,80}(not|less|no longer|stop|bounded|limit).{0,30}(keep|store|hold)?",
            r"(keep|store|hold).{0,40}(less|fewer|only|nothing|not)",
        ),
        near_fix=(r"persistent_workers", r"(fewer|less|no) workers", r"num_workers", r"dataset", r"restart"),
    ),
    # 96 images at once where 4 x 24 would do.
    Expected(
        name="plankton",
        cause=(
            r"activation",
            r"saved (for (the )?backward|tensors)",
            (
                r"(forward|intermediate).{0,80}(tensor|output|result|buffer).{0,80}(peak|memory|hold|kept|mib"
                r"|gib|mb|gb)"
            ),
            r"(peak|memory).{0,120}(intermediate|saved|kept for (the )?backward|batch( size)?)",
        ),
        near=(r"\bpeak\b", r"memory"),
        fix=(
            r"checkpoint",
            r"(small|less|lower|reduc|half|halv).{0,40}batch",
            r"batch.{0,30}(small|less|lower|reduc|half|halv)",
            r"microbatch|micro-batch|accumulat",
            r"bf16|bfloat16|half precision|16-?bit|mixed precision|inplace|in-place|offload",
        ),
        near_fix=(r"batch", r"precision", r"activation"),
        accuse=(r"activation.{0,80}(most|main|largest|half|dominat|[6-9]\d ?%)",),
        is_note=True,
    ),
    # AdamW keeps two more copies of 27 million weights.
    Expected(
        name="vocoder",
        cause=(
            r"optimi[sz]er('s)?.{0,40}(state|memory|moment|buffer|average)",
            r"(\bstates?\b|moments?\b|exp_avg|averages).{0,60}(optimi[sz]er|adamw?)",
            r"adamw?.{0,80}(state|moment|exp_avg|memory|two (copies|tensors)|twice)",
        ),
        near=(r"\bpeak\b", r"optimi[sz]er", r"memory"),
        fix=(
            r"(8-?bit|low-?bit|quanti[sz]ed)",
            r"adafactor|\bsgd\b|\blion\b|\bgalore\b|\bmuon\b",
            r"optimi[sz]er (with|that|which|of).{0,40}(less|fewer|no|smaller|without|one)",
            r"(smaller|less|lighter|other|cheaper|memory-?efficient).{0,30}optimi[sz]er",
            r"shard|zero\b|fsdp|deepspeed|offload",
            r"state.{0,60}(bf16|bfloat16|16|lower precision|half)",
            r"without momentum|no momentum",
        ),
        near_fix=(r"optimi[sz]er", r"precision", r"smaller model|fewer (parameters|weights)"),
        accuse=(r"optimi[sz]er('s)? state", r"(moment|exp_avg).{0,60}optimi[sz]er"),
        is_note=True,
    ),
    # The bytes of all frames, made to floats at the start.
    Expected(
        name="gesture_video",
        cause=(
            (
                r"(dataset|data set|training data|frames|input data).{0,160}"
                r"(memory|float32|copy|copies|copied|peak|\bmib\b|\bgib\b|\bmb\b|\bgb\b|holds|uint8|materiali[sz]ed)"
            ),
            (
                r"(memory|float32|peak|\bmib\b|\bgib\b|\bmb\b|\bgb\b|holds).{0,160}(dataset|data set"
                r"|training data|frames|input data)"
            ),
            r"NormalizedFrames",
        ),
        near=(r"\bpeak\b", r"memory", r"before (the )?(training|first step)", r"host"),
        fix=(
            r"uint8|bytes|8-?bit|integer",
            (
                r"(convert|normali[sz]e|cast|scale|decode).{0,60}(item|batch|sample|__getitem__|on the fly|later"
                r"|when|each)"
            ),
            r"memmap|memory.map|mmap|lazy|lazily|stream|on demand|from (the )?disk|read .{0,30}(when|as|needed)",
            r"(smaller|lower|compact|half|narrow|16).{0,30}(type|dtype|precision|form|float)",
            r"float16|bfloat16|fp16|bf16",
            r"(part|parts|shards|less|only what).{0,40}(data|needed|memory)",
        ),
        near_fix=(r"dataset", r"frames", r"\bdata\b", r"free|release|delete"),
        accuse=(
            r"float32.{0,60}(copy|dataset|frames)",
            r"(copy|copies) of the (dataset|data|frames)",
            r"NormalizedFrames",
        ),
        is_note=True,
    ),
    # Rank 1 decompresses its records.
    Expected(
        name="reactions",
        cause=(
            r"(rank|process).{0,160}(data|input|batch|dataset|decompress|bz2|Archive|__getitem__|load|read)",
            r"(data|input|dataset|decompress|bz2|Archive|__getitem__|loader).{0,160}(rank|process)",
        ),
        near=(
            r"rank",
            r"straggl|uneven|imbalanc|apart|slowest",
            r"(wait|barrier|all-?reduce|collective|synchroni[sz])",
            r"input-?bound|data",
        ),
        fix=(
            r"decompress|bz2|packed|unpack|compress|Archive",
            (
                r"(speed|faster|move|same|shar|balanc|even|equal|cache|prepare|store).{0,80}(data|input|dataset"
                r"|rank|reading|decod|__getitem__|load)"
            ),
            r"num_workers|worker",
            r"(data|dataset|input|__getitem__|load).{0,80}(rank|faster|balanc|even|same|equal)",
        ),
        near_fix=(r"\brank", r"data", r"balanc"),
        accuse=(
            r"rank \d.{0,100}(slow|late|longer|straggl|behind|last)",
            r"straggl|uneven|imbalanc",
            r"decompress|bz2",
        ),
    ),
    # Rank 1 gets the long half of the lines.
    Expected(
        name="server_logs",
        cause=(
            (
                r"rank.{0,200}(long|length|more (work|tokens|samples|data|comput)|larger|bigger|comput|forward"
                r"|backward|work|shape|uneven|imbalanc|padd)"
            ),
            (
                r"(long|length|more (work|tokens|samples|data|comput)|larger|bigger|uneven|imbalanc|straggl"
                r"|shape).{0,200}rank"
            ),
        ),
        near=(
            r"rank",
            r"straggl|uneven|imbalanc|apart|slowest",
            r"(wait|barrier|all-?reduce|collective|synchroni[sz])",
        ),
        fix=(
            (
                r"balanc|even(ly)?\b|equal|same (work|length|number|amount|size)|distribut|spread|interleav|mix"
                r"|shuffle|redistribut"
            ),
            r"(length|long|token|sampler|bucket|shard|split).{0,100}(rank|process|across|between|each|both)",
            r"(rank|process|across|between|each|both).{0,100}(length|long|token|sampler|bucket|shard|split)",
        ),
        near_fix=(r"\brank", r"sampler", r"length", r"pad"),
        accuse=(r"rank \d.{0,100}(slow|late|longer|straggl|behind|last|more)", r"straggl|uneven|imbalanc"),
    ),
    # Rank 0 draws in each step, rank 1 waits.
    Expected(
        name="routes",
        cause=(
            r"RouteMaps|\bdraw\b|canvas",
            r"rank (0|zero).{0,160}(callback|hook|on_train_batch_end|python|own code|log|extra)",
            r"(callback|hook|on_train_batch_end).{0,160}(rank|process|straggl|wait)",
        ),
        near=(
            r"rank",
            r"callback|hook|on_train_batch_end",
            r"straggl|uneven|imbalanc|apart|slowest",
            r"(wait|barrier|all-?reduce|collective|synchroni[sz])",
        ),
        fix=(
            r"RouteMaps|\bdraw\b",
            (
                r"(callback|hook|on_train_batch_end).{0,100}(less|rare|every|seldom|few|faster|cheaper|move"
                r"|remove|outside|after|thread|process|interval|n-?th)"
            ),
            r"(less often|rarely|every \w+ (steps|batches)|every_n|seldom).{0,80}",
        ),
        near_fix=(r"callback|hook|on_train_batch_end", r"\brank", r"balanc"),
        accuse=(
            r"RouteMaps|\bdraw\b",
            r"rank \d.{0,100}(slow|late|longer|straggl|behind|last)",
            r"straggl|uneven|imbalanc",
        ),
    ),
    # Rank 0 holds the whole gallery, rank 1 nothing.
    Expected(
        name="identities",
        cause=(
            r"rank.{0,200}(memory|peak|rss|pss|mib|gib|mb|gb)",
            r"(memory|peak|rss|pss).{0,200}rank",
            r"(gallery|Faces).{0,160}(memory|mib|gib|mb|gb|peak|rank)",
        ),
        near=(r"\brank", r"gallery", r"memory", r"\bpeak\b", r"uneven|imbalanc"),
        fix=(
            r"gallery",
            (
                r"(shard|split|spread|distribut|share|balanc|even|partition|divide|part).{0,80}(rank|process"
                r"|memory|tensor|data)"
            ),
            r"(rank|process|memory|tensor|data).{0,80}(shard|split|spread|distribut|balanc|even|partition|divide)",
            r"(only|what).{0,40}rank (0|zero).{0,60}(hold|keep|load|alloc|more)",
            r"memmap|mmap|memory.map|shared memory|lazily|when (it is )?needed",
        ),
        near_fix=(r"\brank", r"memory", r"snapshot|compare|tensors"),
        accuse=(
            (
                r"rank.{0,120}(more|less|uneven|imbalanc|differ|larger|apart|most).{0,60}(memory|peak|rss|mib"
                r"|gib|mb|gb)"
            ),
            r"(memory|peak|rss).{0,80}(uneven|imbalanc|differ|apart).{0,60}rank",
        ),
        is_note=True,
    ),
    # Twelve worker processes on two cores.
    Expected(
        name="voices",
        cause=(
            r"\b(12|twelve|too many|more|many|number of)\b.{0,40}worker",
            r"num_workers.{0,20}\b(12|cores?|cpus?|too)\b",
            r"worker.{0,120}(cores?|cpus?|compete|contend|oversubscri|too many|start-?up|starting)",
            r"(cores?|cpus?|oversubscri|contention|compete).{0,120}worker",
        ),
        near=(
            r"worker",
            r"(cores?|cpus?).{0,60}(busy|taken|share|wait|oversubscri|contend)",
            r"wait.{0,40}(core|cpu)",
            r"thread",
            r"start-?up|first (batch|step)",
        ),
        fix=(
            r"(fewer|less|reduce|lower|decrease).{0,40}(worker|num_workers|process)",
            (
                r"(num_workers|workers?).{0,40}(fewer|less|lower|reduce|to (0|1|2|one|two|zero)\b|= ?(0|1|2)\b"
                r"|at most|number of cores)"
            ),
            r"(one|two|1|2|0|no) workers?",
        ),
        near_fix=(r"num_workers|worker", r"cores?", r"thread"),
        accuse=(
            r"(too many|more|12|twelve).{0,40}workers?",
            r"workers?.{0,100}(compete|contend|oversubscri|too many|more than)",
        ),
    ),
    # A text is written after every fourth step.
    Expected(
        name="stories",
        cause=(
            r"\bwrite\b|Storyteller\.(write|on_)",
            r"on_train_batch_end",
            (
                r"(sampl|generat|writ|stories|inference|evaluat|show).{0,120}(every|each|often|step|hook"
                r"|training|%|ms)"
            ),
            r"hook.{0,80}(model|forward|generat|sampl|write|on_train)",
        ),
        near=(r"\bhook\b", r"callback", r"forward.{0,60}(more|outside|several|extra)", r"multinomial", r"show_every"),
        fix=(
            (
                r"(less often|rarely|seldom|fewer|every (\w+ )?(hundred|thousand|epoch|n)|less frequent"
                r"|lower frequency|reduce).{0,80}"
            ),
            r"show_every|\bwrite\b|on_train_batch_end",
            r"(once|end|after).{0,30}(epoch|validation|training)",
            r"(k/?v|key.value|past).{0,20}cache",
            r"(shorter|fewer (tokens|words|steps))",
        ),
        near_fix=(r"hook", r"callback", r"Storyteller", r"compile"),
        accuse=(
            r"\bwrite\b",
            r"on_train_batch_end.{0,100}(%|ms|slow|cost|tak)",
            r"(sampl|generat).{0,60}(text|stor|too often|every)",
        ),
    ),
    # The norm of each gradient is logged in each step.
    Expected(
        name="bird_songs",
        cause=(
            r"on_before_optimizer_step",
            r"(norm|gradient norm|grad_norm).{0,120}(each|every|log|hook|parameter|item|%|ms)",
            (
                r"(self\.log|\blog\b|logging|logged|\.item|item\(\)).{0,120}(each|every|many|per|parameter|norm"
                r"|hook|values|times|calls|%|ms)"
            ),
            r"hook.{0,80}(%|ms|slow|norm|log|each step|on_before)",
            r"(many|\d+) (values|calls|metrics).{0,60}log",
        ),
        near=(r"\bhook\b", r"\blog", r"norm", r"callback"),
        fix=(
            (
                r"(less often|rarely|seldom|every (\w+ )?(step|batch|n\b|n-?th)|fewer|interval|not (in )?each"
                r"|once|less frequent).{0,100}"
            ),
            r"on_before_optimizer_step",
            r"foreach_norm|_foreach|get_total_norm|(one|single|total) (norm|value|number|call)|log_dict|stack",
            r"(without|remove|avoid|no|drop).{0,30}(\.item|item\(\)|log|norm|hook)",
            r"every_n|log_every",
        ),
        near_fix=(r"hook", r"\blog", r"norm", r"item"),
        accuse=(
            r"on_before_optimizer_step.{0,100}(%|ms|slow|cost|tak)",
            r"(norm|\.item|item\(\)).{0,80}(each|every) (step|parameter)",
            r"(too many|many|\d{2,}) (values|metrics|calls).{0,40}log",
        ),
    ),
    # The network runs for the loss, and again for the accuracy.
    Expected(
        name="wake_words",
        cause=(
            (
                r"\b(second|two|twice|repeated|again|extra|another|double|duplicate|several|more than once"
                r"|redundant)\b"
                r".{0,120}(forward|model|network|same input|Keywords|accuracy)"
            ),
            (
                r"(forward|model|network|same input|Keywords).{0,120}"
                r"\b(second|two|twice|repeated|again|extra|another|double|duplicate|more than once|recomput\w*"
                r"|2(\.0)? times)\b"
            ),
            r"\baccuracy\b.{0,120}(forward|model|network|again|second|run|%|ms)",
            r"forward.{0,80}\baccuracy\b",
            r"forward.{0,60}(no|never|without|not).{0,30}backward",
        ),
        near=(r"\bforward\b", r"recomput"),
        fix=(
            r"(reuse|re-use|share|keep|pass|use|store).{0,80}(output|logit|result|prediction|forward|them|it)",
            r"(one|single|only) forward|forward.{0,40}once|\bonce\b",
            r"accuracy",
        ),
        near_fix=(r"no_grad|inference_mode", r"forward", r"metric"),
        accuse=(
            r"(second|two|twice|repeated|extra|another|double|duplicate|more than once|redundant).{0,80}forward",
            r"forward.{0,80}(second|twice|repeated|again|double|duplicate|more than once)",
            r"\baccuracy\b.{0,60}(%|ms)",
        ),
    ),
    # One sentence at a time, sixteen for a step.
    Expected(
        name="parts_of_speech",
        cause=(
            r"batch(es)?( size)?( is| of|es of)? ?(of |is |= ?)?(1|one)\b",
            r"(one|1|single) (sample|sequence|sentence|item|example|row)",
            r"(small|tiny) (micro-?)?batch",
            r"batch.{0,60}(too small|small|tiny)",
            r"accumulat.{0,120}(batch|small|1|one)",
            r"(tiny|small|many) (operat|kernel|op).{0,160}(batch|sample|accumulat)",
        ),
        near=(
            r"(tiny|small|short) (operat|kernel|op\b|ops)",
            r"overhead|python|dispatch",
            r"accumulat",
        ),
        fix=(
            r"(larger|bigger|increase|raise|greater|more).{0,60}batch",
            r"batch.{0,60}(larger|bigger|increase|raise|up|16|more|of \d+)",
            r"(more|several|many) (samples|sentences|sequences|items).{0,60}(batch|at once|together|step)",
            r"(instead of|without|fewer|less|lower|reduce).{0,40}accumulat",
        ),
        near_fix=(r"batch", r"accumulat", r"compile", r"fewer (operat|op)"),
        accuse=(
            r"(small|tiny) batch|batch.{0,30}(too small|tiny)|batch( size)? of (1|one)\b",
            r"accumulate_grad_batches|gradient accumulation",
        ),
    ),
    # The penalty is a loop over all parameters.
    Expected(
        name="insurance",
        cause=(
            r"\bpenalty\b|Premium",
            (
                r"(loop|one by one|each parameter|every parameter|per parameter|parameter by parameter"
                r"|all parameters|many small|tiny|small (operat|op|tensor)).{0,160}"
                r"(regulari[sz]|penalt|weight|abs|pow|parameter)"
            ),
            (
                r"(regulari[sz]|penalt|weight|abs|pow).{0,160}(loop|one by one|each parameter|per parameter"
                r"|parameter by parameter|many small|tiny|small (operat|op|tensor))"
            ),
        ),
        near=(
            r"(small|tiny|short|many) (operat|op\b|ops|kernel|tensor)",
            r"python",
            r"overhead",
            r"training_step",
            r"loop",
        ),
        fix=(
            r"weight_decay|weight decay",
            r"\bpenalty\b",
            (
                r"foreach|flat(ten)?|concatenat|(all|many|several) (parameters|tensors).{0,40}(at once|together"
                r"|in one)"
            ),
            r"(one|single) (call|tensor|operation|vector)",
            r"vectori[sz]",
        ),
        near_fix=(r"compile", r"fewer (operat|op|tensor|parameter|call)", r"loop", r"batch"),
        accuse=(
            r"\bpenalty\b",
            r"(python loop|loop over|one by one|parameter by parameter).{0,80}(parameter|weight)",
            r"regulari[sz]",
        ),
    ),
    # Each picture is decompressed and stretched in __getitem__ in the main process. A good engineer: decode once,
    # keep the arrays (or let DataLoader workers decode).
    Expected(
        name="galaxies",
        cause=(
            r"GalaxyPlates",
            r"decode_plate",
            r"__getitem__",
            r"pictures\.py:\d+.*(data|load|decod)",
            r"decod|decompress",
        ),
        near=(r"input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch)|num_workers|no workers",),
        fix=(WORKERS, ONCE, r"decode.*(cheap|fast|less)|(cheaper|faster) decod"),
        near_fix=(r"__getitem__|decode_plate|GalaxyPlates|speed up|prefetch|data set|dataset",),
    ),
    # One worker cannot fetch the photos from a slow archive as fast as the model takes them. A good engineer:
    # more workers (they only wait), or a local copy of the photos.
    Expected(
        name="coral_photos",
        cause=(
            r"(one|1|single|few|too few|only)\W+(\w+\W+){0,3}workers?|num_workers\W*=?\W*1",
            r"workers? (can(no|')t|do(es)? not|don't) keep|not enough workers|keep\w* up",
            r"ReefArchive|\bdownload\b|time\.sleep|sleep",
        ),
        near=(r"input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch|workers?)|__getitem__",),
        fix=(
            r"num_workers",
            r"(more|additional|raise|increase|add)\W+(\w+\W+){0,4}workers",
            r"workers?\W+(\w+\W+){0,4}(more|up to|to [2-9])",
        ),
        near_fix=(
            ONCE,
            r"prefetch_factor|local (copy|disk)|concurrent|thread pool|batch\w* (the )?requests|__getitems__|workers?",
        ),
    ),
    # The hook on_after_batch_transfer equalizes each picture of the batch in a numpy loop in the main process. A
    # good engineer: equalize once before the training, or in the data set with workers, or the whole batch in
    # torch.
    Expected(
        name="traffic_signs",
        cause=(
            r"on_after_batch_transfer",
            r"equaliz",
            r"SignClassifier\.on_",
            r"pictures\.py:\d+.*(hook|transform|histogram)",
        ),
        near=(r"\bhook\b|transform|augment|batch transfer|np\.histogram|numpy|interp|pictures\.py:\d+",),
        fix=(
            ONCE,
            WORKERS,
            r"(move|into|in) .*(data ?set|__getitem__|collate)",
            r"vectori[sz]|whole batch|batched|torch(vision)? op|tensor op|without (a )?(Python )?loop",
        ),
        near_fix=(r"on_after_batch_transfer|equaliz|cheaper|faster|less often",),
    ),
    # The average of the weights is made by deep copies of both state dicts each step. A good engineer: update the
    # average in place (lerp_, torch._foreach_lerp_, AveragedModel, EMA callback).
    Expected(
        name="lunar_craters",
        cause=(
            r"deep ?cop|copy\.",
            r"state_dict|copies of the (weights|parameters|model)|cop(y|ies|ying) .*(weights|parameters|model)",
            r"moving average|\bEMA\b|average(d)? (of the )?(weights|model)",
        ),
        near=(r"on_train_batch_end|CraterNet|\bhook\b|allocat|copy_|pictures\.py:\d+",),
        fix=(
            r"in.?place|lerp|_foreach|AveragedModel|swa_utils|WeightAverag|EMA ?(callback|weight)",
            r"without (a )?(deep ?)?cop|avoid .*cop(y|ies)|no (deep ?)?cop(y|ies)",
        ),
        near_fix=(r"less often|every (n|k|few|\d+)|on_train_batch_end|fewer steps|cheaper|deep ?copy",),
    ),
    # gc.collect() after each batch. A good engineer: delete the call (or do it each epoch).
    Expected(
        name="snowflakes",
        cause=(r"gc\.collect", r"garbage.?collect", r"\bgc\b", r"full collection|forced? collect"),
        near=(r"on_train_batch_end|FlakeClassifier|\bhook\b|pictures\.py:\d+",),
        fix=(
            r"(remove|delete|drop|without|stop|don't|do not|avoid|less|once|every)\W.*(gc|collect|call)",
            r"gc\.collect|garbage.?collect",
        ),
        near_fix=(
            r"gc\.(freeze|disable|set_threshold)|less often|every (n|k|few|\d+)|on_train_batch_end|once (per|an) epoch",
        ),
    ),
    # Each FEN line is parsed and its attacked squares found by Python loops in __getitem__ without workers. A
    # good engineer: encode each position once, or use workers.
    Expected(
        name="chess_moves",
        cause=(
            r"ChessPositions",
            r"encode_position",
            r"__getitem__",
            r"language\.py:\d+.*(data|load|encod|sample)",
        ),
        near=(
            (
                r"input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch)|num_workers|no workers|pure Python"
                r"|Python loop"
            ),
        ),
        fix=(WORKERS, ONCE, r"vectori[sz]|numpy"),
        near_fix=(r"__getitem__|encode_position|ChessPositions|speed up|prefetch|data set|dataset",),
    ),
    # Haiku of 60 to 66 letters are padded to 128. A good engineer: pad to the longest of the batch (pad_sequence
    # in collate_fn).
    Expected(
        name="haiku",
        cause=(r"\bpad", r"key_padding_mask"),
        near=(
            r"sequence length|longer than|masked|ignore_index|pad_to_context|context|collate|\b128\b|empty positions",
        ),
        fix=(
            r"pad\w*\W+(\w+\W+){0,6}(longest|batch|actual)|longest",
            r"pad_sequence|bucket|similar length|dynamic pad|pack(ed|ing)?\b|nested tensor|trim|crop|truncate|jagged",
            r"(less|without|shorter|fewer) pad",
        ),
        near_fix=(r"\bpad|collate_fn|shorter|max_length|length",),
    ),
    # The recipes are tokenized with regular expressions each time they are read. A good engineer: tokenize once.
    Expected(
        name="cookbook",
        cause=(r"tokeni[sz]", r"Recipes", r"__getitem__", r"language\.py:\d+.*(data|load|regex|sample)"),
        near=(
            (
                r"input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch)|num_workers|no workers|pure Python"
                r"|\bregex|\bre\."
            ),
        ),
        fix=(ONCE, r"(pre|already).?tokeni[sz]", WORKERS),
        near_fix=(r"__getitem__|Tokenizer|faster tokeni[sz]er|speed up|prefetch|batch\w* tokeni[sz]",),
    ),
    # Trainer(detect_anomaly=True) is left on. A good engineer: switch it off after the bug is found.
    Expected(
        name="support_tickets",
        cause=(r"anomaly",),
        near=(r"\bnan\b|isnan|traceback|debug|autograd check|backward",),
        fix=(r"detect_anomaly|anomaly",),
        near_fix=(r"debug|nan check|switch off|turn off",),
    ),
    # An epoch has 6 steps and the two workers start again in each. A good engineer: persistent_workers=True (or
    # longer epochs, or no workers for data in memory).
    Expected(
        name="piano_rolls",
        cause=(
            r"(re)?start\w*\W+(\w+\W+){0,6}workers?|workers?\W+(\w+\W+){0,6}(re)?(start|creat|spawn|fork|launch)\w*",
            r"persistent_workers",
            (
                r"workers? (start|creation|startup)|(each|every|short|per|between) epochs?.*workers?|workers?.*(each"
                r"|every|short|per|between) epoch"
            ),
        ),
        near=(
            (
                r"short epochs?|first batch|between epochs|epoch (start|boundar)|(each|start of (an|the|each)) epoch"
                r"|input.?bound|data ?load|workers"
            ),
        ),
        fix=(
            r"persistent_workers|persistent workers|keep .*workers",
            r"num_workers\W*=?\W*0|without workers|no workers",
        ),
        near_fix=(r"longer epochs?|fewer epochs?|more (steps|batches) (per|in|an) |fewer workers|num_workers|repeat",),
    ),
    # The confusion matrix is filled by a Python loop with .item() for each sample. A good engineer: bincount /
    # torchmetrics.
    Expected(
        name="mushrooms",
        cause=(
            r"\.?\bitem\b",
            r"MushroomModel\.count|\bcount\b.*records\.py|confusion",
            (
                r"_local_scalar_dense|element.?(by|wise).?element|each element|Python loop|loop over|one (element|value"
                r"|by one)"
            ),
            r"records\.py:\d+.*(loop|scalar|item|tiny|small)",
        ),
        near=(r"scalar|unbind|\bsync|(tiny|small|many) (op|call)|training_step|records\.py:\d+|overhead|select\b",),
        fix=(
            (
                r"vectori[sz]|bincount|scatter|index_put|index_add|confusion_?matrix|torchmetrics|tensor operation"
                r"|whole (batch|tensor)|one (op|call)"
            ),
            r"\.?tolist|out of the loop|without .*loop|instead of .*(loop|item)|avoid .*item|replace .*(loop|item)",
        ),
        near_fix=(r"\bitem\b|loop|less often|every (n|k|few|\d+)|\.numpy\(|batch\w* the",),
    ),
    # BinaryAUROC keeps all predictions, and compute() sorts all of them at each step. A good engineer: compute at
    # the end of the epoch (update only in the step).
    Expected(
        name="loan_defaults",
        cause=(
            r"AUROC|auroc",
            r"\bmetrics?\b.*(each|every|step|all|comput|grow)",
            r"torchmetrics",
            r"compute\b.*(each|every) step",
        ),
        near=(r"\bmetrics?\b|sort|training_step|grow\w*|records\.py:\d+|slower (and slower|with|over)|cumsum|\blog\b",),
        fix=(
            (
                r"(epoch|validation).*(compute|metric|auroc)|(compute|metric|auroc).*(epoch|less often|validation|every"
                r"|end)"
            ),
            r"update\(\)|only update|on_(train_)?epoch(_end)?|end of (the|each|an) epoch|once (per|an|each) epoch",
            r"thresholds|binned",
        ),
        near_fix=(r"metric|auroc|compute|less often|every (n|k|few|\d+)|reset",),
        # The twin also keeps its predictions until the end of the epoch; the memory freed between them piles up.
        accuse=(r"AUROC|\bmetrics?\b|torchmetrics|sort|cumsum|compute\(\)",),
    ),
    # A callback takes the singular values of all layers after each batch. A good engineer: every 100 steps or
    # each epoch.
    Expected(
        name="wine_ratings",
        cause=(r"RankMonitor", r"svd", r"\bcallback", r"singular"),
        near=(r"on_train_batch_end|linalg|records\.py:\d+|\bhook\b",),
        fix=(
            (
                r"less often|every (n|k|few|some|\d+)|(each|per|an|once per|end of the|every) epoch|on_train_epoch_end"
                r"|fewer (calls|steps)|rarely|n-th|nth"
            ),
            r"(remove|drop|cheaper|faster|disable).*(callback|RankMonitor|svd|work)",
        ),
        near_fix=(r"callback|RankMonitor|svd|on_train_batch_end|cheaper",),
    ),
    # torch.set_num_threads(1) leaves one of the cores idle. A good engineer: remove it.
    Expected(
        name="ad_auctions",
        cause=(
            r"(one|1|single|few|too few|only)\W+(\w+\W+){0,4}thread|thread\w*\W+(\w+\W+){0,4}(one|1)\b",
            r"set_num_threads|num_threads|OMP_NUM_THREADS",
        ),
        near=(r"idle core|cores? (is|are|stays?|idle)|one core|\bthreads?\b|unused core|compute.?bound.*core",),
        fix=(
            r"set_num_threads|OMP_NUM_THREADS|MKL_NUM_THREADS|num_threads",
            r"(more|two|2|as many|raise|increase|all)\W+(\w+\W+){0,5}(threads|cores)",
        ),
        near_fix=(r"threads?|\bcores?\b",),
        # "The training thread waits for a core" is true of a busy machine.
        accuse=(
            r"(one|1|single|few|too few|only)\W+(\w+\W+){0,4}threads?\b(?! waits)|num_threads|(idle|unused) cores?",
        ),
    ),
    # collate_fn makes a tensor for each hour of each stay. A good engineer: numpy.stack / torch.stack whole
    # stays, or the tensors once in the data set; or workers.
    Expected(
        name="icu_stays",
        cause=(r"collate",),
        near=(
            (
                r"input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch)|num_workers|no workers|Python loop"
                r"|records\.py:\d+|float\("
            ),
        ),
        fix=(
            (
                r"vectori[sz]|\bstack|from_numpy|numpy|default_collate|one (call|op)|without (a )?loop|whole (stay"
                r"|array|sample)"
            ),
            WORKERS,
            ONCE,
        ),
        near_fix=(r"collate|speed up|cheaper|faster|prefetch|loop",),
    ),
    # The last 400 000 trips live as Python objects with a list each; new ones arrive all the time, so that the
    # garbage collector goes through all of them again and again. A good engineer: keep them in arrays or tensors;
    # or gc.freeze(), a higher threshold.
    Expected(
        name="taxi_trips",
        cause=(
            r"garbage|\bgc\b",
            r"collector|(full|generation.?2|gen.?2) collection",
            r"live (Python )?objects|objects .*alive|many (Python )?objects",
        ),
        near=(
            (
                r"TripObjects|Python objects|__iter__|input.?bound|data ?load|wait\w* for (the )?(data|next batch"
                r"|batch)|\bTrip\b|records\.py:\d+"
            ),
        ),
        fix=(
            r"gc\.(freeze|disable|set_threshold)|threshold|freeze",
            (
                r"(arrays?|tensors?|numpy)\b.*(instead|object|hold|keep|store)|(instead|hold|keep|store"
                r"|objects?)\b.*\b(arrays?|tensors?|numpy)"
            ),
            r"fewer (Python |live )?objects",
        ),
        near_fix=(r"garbage|\bgc\b|objects|numpy|arrays?|tensors?|num_workers|workers?",),
    ),
    # When the next station begins, its whole file is decompressed between two samples; the training stands still.
    # A good engineer: a worker that reads ahead, uncompressed or memory-mapped files, smaller files.
    Expected(
        name="seismic_traces",
        cause=(
            r"StationFiles|__getitem__|\bread\b.*signals\.py|signals\.py:\d+.*(data|load|read|decompress|shard)",
            r"bz2|decompress|shard|station|new file|(load|open|read)\w* (of )?(a|the|each|next|new|its) (file|shard)",
            (
                r"(every|each|once in|periodic\w*) .*(steps|batches|samples).*(stall|slow|wait|long|load|fetch)|(stall"
                r"|slow|spike|long)\w*.*(every|each) \w* ?(\d+|steps|batches)"
            ),
        ),
        near=(
            (
                r"input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch)|num_workers|no workers|stall|spike"
                r"|slow steps"
            ),
        ),
        fix=(
            WORKERS,
            r"prefetch|read.?ahead|background|in advance|ahead of time|ahead",
            r"uncompress|mmap|memory.?map|smaller (file|shard)|faster (format|codec|compress)|cach|preload|npy|convert",
        ),
        near_fix=(r"StationFiles|__getitem__|\bread\b|shard|speed up|compress",),
    ),
    # self.log is called for each of 150 gauges at each step. A good engineer: log the mean, or a dictionary every
    # n steps, or the vector in one go.
    Expected(
        name="river_gauges",
        cause=(r"self\.log|\blog\(|\blogg(ing|ed)\b|\blog calls|\blog_dict|logged values|many (values|metrics)",),
        near=(
            (
                r"\bmetrics?\b|result collection|_ResultCollection|logger|training_step|signals\.py:\d+|bookkeeping"
                r"|Lightning"
            ),
        ),
        fix=(
            (
                r"(fewer|less|mean|aggregate|average|summar|every|only|once|one|reduce|not each|limit)\W.*(log|value"
                r"|metric)|log\w*.*(fewer|less|mean|aggregate|every|once|only|reduce|epoch|one )"
            ),
            r"log_dict|single tensor|self\.logger",
        ),
        near_fix=(r"\blog|metric|less often|every (n|k|few|\d+)",),
    ),
    # A callback writes the whole history as JSON again after each batch. A good engineer: append a line, or write
    # each epoch.
    Expected(
        name="bee_hives",
        cause=(
            r"HiveReport",
            r"\bcallback",
            r"json",
            r"rewrit|writ\w+ (the|its|a) (whole|entire|full|growing)|whole (file|history)",
        ),
        near=(
            (
                r"on_train_batch_end|disk|writ(es|ing)|file|grow\w*|slower (and slower|with|over)|signals\.py:\d+"
                r"|encoder|\bhook\b"
            ),
        ),
        fix=(
            r"append|json ?lines|jsonl|incremental|only the (new|last)|one line|add .* line",
            (
                r"less often|every (n|k|few|some|\d+)|(each|per|an|once per|end of the|every) epoch|at the end"
                r"|on_train_(epoch_)?end|fewer (calls|steps|writes)|buffer|background"
            ),
        ),
        near_fix=(r"callback|HiveReport|json|on_train_batch_end|cheaper|write",),
    ),
    # Forward hooks take percentiles of each layer's output with numpy at each step. A good engineer: every n
    # steps, on a sample of the values, or remove the hooks.
    Expected(
        name="bridge_strain",
        cause=(r"forward.?hook|\bhooks?\b", r"percentile|StrainModel\.watch|\bwatch\b"),
        near=(r"partition|numpy|nn\.Linear|\bLinear\b|forward|signals\.py:\d+|quantile",),
        fix=(
            (
                r"(remove|drop|unregister|disable|cheaper|less work|move).*(hook|percentile)|hook.*(remove|drop"
                r"|less often|every|only|cheaper|sample)"
            ),
            (
                r"less often|every (n|k|few|some|\d+)|(each|per|an|once per|every) epoch|fewer (calls|steps)|sub-?sampl"
                r"|sample of"
            ),
        ),
        near_fix=(r"hook|percentile|watch|cheaper",),
    ),
    # 16 workers for data in memory on two cores: starting them and their fight for the cores costs more than they
    # fetch. A good engineer: no worker, or one or two.
    Expected(
        name="smart_meters",
        cause=(
            r"(too )?many workers|more workers|16\W+(\w+\W+){0,3}workers|workers\W+(\w+\W+){0,6}cores|num_workers",
            r"oversubscri|overcommit|compet\w+|fight|contend|contention",
            r"start\w*\W+(\w+\W+){0,6}workers?|workers?\W+(\w+\W+){0,4}start",
        ),
        near=(
            (
                r"\bworkers?\b|input.?bound|data ?load|wait\w* for (the )?(data|next batch|batch)|first batch"
                r"|persistent_workers"
            ),
        ),
        fix=(
            r"(fewer|less|lower|reduce|at most|no|without|one|two|0|1|2)\W+(\w+\W+){0,5}(workers|num_workers)",
            (
                r"num_workers\W*=?\W*(to )?[012]\b|(lower|reduce|set|decrease) num_workers|num_workers .*(cores|lower"
                r"|fewer)"
            ),
        ),
        near_fix=(r"persistent_workers|num_workers|workers",),
    ),
    # Each item computes the same pseudo-inverse again. Compute it once, in __init__.
    Expected(
        name="milk_spectra",
        cause=(r"pinv", r"solver", r"MilkSpectra", r"__getitem__", r"(pseudo.?)?inverse", r"\bsvd\b"),
        near=(r"input.bound", r"wait\w* for (data|batch|the next)", r"data ?load", r"dataset"),
        fix=(
            r"\bonce\b|__init__|precompute|in advance|ahead of time",
            r"cache|keep the result|reuse",
            r"(out of|outside) .{0,30}__getitem__",
        ),
        near_fix=(r"num_workers|workers", r"pinv|solver|__getitem__", r"per batch|whole batch|vectori[sz]e"),
    ),
    # torch.set_num_threads(8) on two cores: the threads wait for each other. A good engineer: as many threads as
    # cores.
    Expected(
        name="radar_echoes",
        cause=(
            (
                r"(too )?many threads|more threads|8\W+(\w+\W+){0,4}threads|threads\W+(\w+\W+){0,6}cores"
                r"|set_num_threads|num_threads"
            ),
            r"oversubscri|overcommit",
        ),
        near=(r"\bthreads?\b|context switch|contention|compet\w+|system time",),
        fix=(
            r"set_num_threads|OMP_NUM_THREADS|num_threads",
            r"(fewer|less|lower|reduce|as many|at most|two|2)\W+(\w+\W+){0,5}threads",
        ),
        near_fix=(r"threads?|\bcores?\b",),
        # "The training thread waits for a core" is true of a busy machine.
        accuse=(r"\bthreads\b|num_threads|oversubscri|overcommit|contention|context switch",),
    ),
    # Validates every 10 steps: run it once an epoch (val_check_interval), or on fewer batches
    # (limit_val_batches).
    Expected(
        name="tide_levels",
        cause=(r"validat", r"val_check_interval", r"evaluation loop"),
        near=(r"\beval",),
        fix=(
            r"val_check_interval",
            r"check_val_every_n_epoch",
            r"limit_val_batches",
            r"validat\w* (less|more rarely)",
            r"less (often|frequent)",
        ),
        near_fix=(r"validat",),
        accuse=(r"validat\w* (takes|costs|too|runs|every)", r"val_check_interval"),
    ),
    # A checkpoint every 5 steps: save less often (every_n_train_steps, once an epoch) or weights only.
    Expected(
        name="seismograms",
        cause=(r"checkpoint", r"\bsav(es?|ing)\b"),
        near=(r"disk", r"writ(es|ing)"),
        fix=(
            r"every_n_train_steps",
            r"every_n_epochs",
            r"train_time_interval",
            r"(save|checkpoint)\w* (\w+ )?(less|more rarely|fewer)",
            r"less (often|frequent)",
        ),
        near_fix=(r"save_weights_only", r"async\w*", r"checkpoint"),
    ),
    # torch.profiler runs around the whole fit: remove it, or profile a few steps with a schedule.
    Expected(
        name="fish_counts",
        cause=(
            r"torch\.profiler",
            r"(second|another|other) profiler",
            r"kineto",
            r"profiler (is|was|left|runs|records)",
            r"profil\w+ (is|was) (on|active|left)",
        ),
        near=(r"with_stack", r"profile_memory", r"tracing", r"profil\w*"),
        fix=(
            r"(remove|disable|drop|stop|turn off|switch off|without|end|take out)[^.]*profil",
            r"profil[^.]*(off|schedule|few steps|remove)",
            r"schedule",
        ),
        near_fix=(r"with_stack", r"profile_memory", r"record_shapes", r"profiler"),
        accuse=(r"torch\.profiler", r"(second|another|other) profiler", r"kineto"),
    ),
    # numpy's float64 data and a model made double to fit: convert the data to float32 and leave the model as it
    # is.
    Expected(
        name="pendulums",
        cause=(r"float64", r"double"),
        near=(r"precision", r"dtype"),
        fix=(
            r"float32",
            r"\.float\(\)",
            r"single precision",
            r"(remove|without|drop)[^.]*\.?double",
            r"32-true",
            r"astype",
        ),
        near_fix=(r"precision", r"dtype"),
    ),
    # Batches of 8 tiny rows: the step is overhead (Python, operator launches); use a batch of 64 or more.
    Expected(
        name="wine_quality",
        cause=(
            r"batch(_size| size|es)?[^.]*(small|tiny|few|only|of 8|8 samples)",
            r"(small|tiny) (mini-?)?batch",
            r"batch_size",
        ),
        near=(r"overhead", r"(small|tiny|short) (operator|op|kernel)", r"dispatch", r"launch"),
        fix=(
            r"(larger|bigger|raise|increase|grow|higher)[^.]*batch",
            r"batch[^.]*(larger|bigger|raise|increase|higher)",
            r"batch_size",
        ),
        near_fix=(r"torch\.compile", r"\bfuse", r"\bcompile"),
        accuse=(r"batch(_size| size|es)?[^.]*(too small|tiny)", r"(small|tiny) (mini-?)?batch"),
    ),
    # A Python loop embeds each moment of the signal by itself: the layers take the whole batch x time tensor in
    # one call.
    Expected(
        name="heartbeats",
        cause=(
            r"python loop",
            r"loops? over",
            r"(in|by|as) a loop",
            r"looped",
            r"(tiny|small|short|many)[^.]*(operator|ops?\b|kernel|call)",
            r"\d+ (times|calls)",
            r"BeatClassifier\.encode",
            r"blocks\.py:(3[7-9]|4[0-3])\b",
        ),
        near=(r"overhead", r"dispatch", r"\bembed\b", r"BeatClassifier", r"encode"),
        fix=(
            r"vectori[sz]",
            r"(one|single|once)[^.]*(call|tensor|operator|batch|time)",
            r"whole (tensor|signal|sequence|batch)",
            r"all (time steps|moments|steps)",
            r"(without|replace|remove|instead of)[^.]*loop",
            r"batch(ed)? (the|call|op)",
        ),
        near_fix=(r"torch\.compile", r"\bcompile", r"vmap", r"\bfuse"),
        accuse=(r"python loop", r"(tiny|small|short)[^.]*(operator|ops?\b|kernel)", r"BeatClassifier\.encode"),
    ),
    # The loss runs in a Python loop over the samples of the batch: compute it on the whole batch.
    Expected(
        name="star_spectra",
        cause=(
            r"python loop",
            r"loops? over",
            r"(in|by|as) a loop",
            r"looped",
            r"(tiny|small|short|many)[^.]*(operator|ops?\b|kernel|call)",
            r"\d+ (times|calls)",
            r"chi_square",
            r"(per|each|every) (sample|star|row)",
        ),
        near=(r"overhead", r"dispatch", r"\bloss\b", r"SpectrumAutoencoder"),
        fix=(
            r"vectori[sz]",
            r"whole (batch|tensor)",
            r"(one|single|once)[^.]*(call|tensor|operator|batch)",
            r"(without|replace|remove|instead of)[^.]*loop",
            r"batch(ed)? (the|call|op)",
        ),
        near_fix=(r"torch\.compile", r"\bcompile", r"vmap", r"\bfuse"),
        accuse=(r"python loop", r"(tiny|small|short)[^.]*(operator|ops?\b|kernel)", r"chi_square"),
    ),
    # Attention by hand writes the length x length scores: use scaled_dot_product_attention(is_causal=True).
    Expected(
        name="chess_games",
        cause=(r"attention", r"softmax"),
        near=(r"masked_fill", r"matmul", r"\bbmm\b", r"scores"),
        fix=(r"scaled_dot_product_attention", r"\bsdpa\b", r"flash", r"MultiheadAttention", r"fused attention"),
        near_fix=(r"torch\.compile", r"\bcompile", r"fused"),
        accuse=(
            r"attention (is )?(by hand|unfused|not fused|written out|naive)",
            r"(naive|unfused|hand-?(made|written)) attention",
            r"masked_fill",
            # The twin's own line, which a page quotes, calls it.
            r"(use|without)\W+(\w+\.)*scaled_dot_product_attention",
        ),
    ),
    # Layer normalization from mean, std and arithmetic: use nn.LayerNorm.
    Expected(
        name="traffic_flow",
        cause=(r"layer ?norm", r"layer_norm", r"normali[sz]ation"),
        near=(r"\bstd\b", r"\bmean\b", r"element-?wise", r"unfused", r"pointwise", r"memory-bound"),
        fix=(
            r"nn\.LayerNorm",
            r"functional\.layer_norm",
            r"F\.layer_norm",
            r"(built-?in|fused|torch's|native)[^.]*(norm|layer)",
            r"layer_norm",
        ),
        near_fix=(r"torch\.compile", r"\bcompile", r"\bfuse"),
        accuse=(
            r"norm\w* (is )?(by hand|unfused|not fused|written out)",
            r"(naive|unfused|hand-?(made|written)) (layer ?)?norm",
            r"\bstd\b",
        ),
    ),
    # Dense gradients and updates for 140,000 embedding rows of which 512 are used: nn.Embedding(sparse=True).
    Expected(
        name="recipes",
        cause=(r"embedding", r"dense grad", r"sparse"),
        near=(r"optimi[sz]er", r"adagrad", r"\bupdate", r"zero_?grad", r"gradient"),
        fix=(
            r"sparse ?= ?True",
            r"sparse (gradient|update|embedding)",
            r"SparseAdam",
            r"EmbeddingBag",
            r"\bsparse",
        ),
        near_fix=(r"smaller (table|embedding)", r"hash", r"fused", r"foreach"),
        accuse=(r"dense grad", r"embedding[^.]*(dense|sparse)", r"sparse ?= ?True"),
    ),
    # A hand-written Adam loops over 98 parameters with a dozen operators each: torch.optim.Adam(fused=True).
    Expected(
        name="glaciers",
        cause=(r"MyAdam", r"optimi[sz]er", r"blocks\.py:2[1-4]\d\b"),
        near=(r"(tiny|small|short|many)[^.]*(operator|ops?\b|kernel)", r"parameter update"),
        fix=(r"fused", r"foreach", r"torch\.optim", r"_foreach_", r"built-?in (adam|optimi[sz]er)"),
        near_fix=(r"in.?place", r"\bcompile", r"torch\.compile", r"addcmul|lerp"),
        accuse=(r"MyAdam", r"optimi[sz]er[^.]*(loop|slow|by hand|unfused|tiny)"),
    ),
    # The discriminator's loss goes back through the generator: detach the fakes (or draw them under no_grad).
    Expected(
        name="roman_coins",
        cause=(
            r"detach",
            r"generator[^.]*(discriminator|unused|never|thrown|discard|wast|need|not)",
            r"discriminator[^.]*generator",
            r"gradients?[^.]*(unused|never used|thrown away|discarded|nobody|overwritten|zeroed|no optimi[sz]er|wast)",
            r"(unneeded|needless|unused|wasted)[^.]*(graph|backward|gradient)",
        ),
        near=(r"\bbackward", r"generator"),
        fix=(r"detach", r"no_grad", r"toggle_optimizer", r"toggled_optimizer", r"requires_grad"),
        near_fix=(r"(cut|stop)[^.]*(graph|gradient)",),
        accuse=(
            r"gradients?[^.]*(unused|never used|thrown away|discarded|overwritten)",
            r"(unneeded|needless|unused|wasted)[^.]*(graph|backward|gradient)",
        ),
    ),
    # The same, with the discriminator frozen while the generator trains.
    Expected(
        name="greek_coins",
        cause=(
            r"detach",
            r"generator[^.]*(discriminator|unused|never|thrown|discard|wast|need|not)",
            r"discriminator[^.]*generator",
            r"gradients?[^.]*(unused|never used|thrown away|discarded|nobody|overwritten|zeroed|no optimi[sz]er|wast)",
            r"(unneeded|needless|unused|wasted)[^.]*(graph|backward|gradient)",
        ),
        near=(r"\bbackward", r"generator"),
        fix=(r"detach", r"no_grad", r"toggle_optimizer", r"toggled_optimizer", r"requires_grad"),
        near_fix=(r"(cut|stop)[^.]*(graph|gradient)",),
        accuse=(
            r"gradients?[^.]*(unused|never used|thrown away|discarded|overwritten)",
            r"(unneeded|needless|unused|wasted)[^.]*(graph|backward|gradient)",
        ),
    ),
    # The teacher runs with a graph and gets gradients that no optimizer uses: torch.no_grad /
    # requires_grad_(False).
    Expected(
        name="handwriting",
        cause=(
            r"teacher",
            r"gradients?[^.]*(unused|never used|thrown away|discarded|nobody|no optimi[sz]er|not optimi[sz]ed|wast)",
            r"(unneeded|needless|unused|wasted)[^.]*(graph|backward|gradient)",
            r"no_grad",
            r"frozen",
        ),
        near=(r"\bbackward",),
        fix=(r"no_grad", r"requires_grad", r"inference_mode", r"detach", r"freeze"),
        near_fix=(r"(cut|stop)[^.]*(graph|gradient)", r"smaller teacher"),
        accuse=(
            r"gradients?[^.]*(unused|never used|thrown away|discarded|no optimi[sz]er)",
            r"(unneeded|needless|unused|wasted)[^.]*(graph|backward|gradient)",
        ),
    ),
    # Two backward passes through one trunk with retain_graph=True: add the losses and go back once.
    Expected(
        name="street_trees",
        cause=(
            r"retain(ed|_graph|s)?",
            r"(two|twice|second|2|double|several|more than one|each loss|per loss)[^.]*backward",
            r"backward[^.]*(twice|two|second|2 times|again|several|each loss)",
        ),
        near=(r"\bbackward", r"\btrunk\b"),
        fix=(
            r"(sum|add|total|combin)\w*[^.]*loss",
            r"loss\w*[^.]*(sum|add|total|combin|together|\+)",
            r"(one|single|once)[^.]*backward",
            r"backward[^.]*once",
        ),
        near_fix=(r"retain_graph",),
        accuse=(r"retain(ed|_graph|s)?", r"(two|twice|double)[^.]*backward", r"backward[^.]*twice"),
    ),
    # Logits and losses with their graph stay in self.outputs: keep numbers (detach, item) or clear the list.
    Expected(
        name="flood_maps",
        cause=(
            r"leak",
            r"memory[^.]*(grow|grew|rise|rose|increas|climb)",
            r"(grow|grew)[^.]*(memory|MB|MiB|GB|GiB)",
            r"self\.outputs",
            r"FloodMapper\.outputs",
            r"(kept|keep|held|hold|retain)\w*[^.]*(graph|logits|tensor|output|list)",
        ),
        near=(r"peak memory", r"\bMi?B\b"),
        fix=(
            r"detach",
            r"\.item\(\)",
            r"clear",
            r"\.outputs",
            r"(reduce|store|keep|append)[^.]*(number|scalar|float|mean|summary)",
            r"torchmetrics|running",
        ),
        near_fix=(r"\.cpu\(\)", r"\blist\b", r"fewer", r"referen"),
        accuse=(r"leak", r"memory[^.]*(grow|grew|rise|rose|climb)", r"\.outputs"),
    ),
    # The 3072 x 3072 similarities (and their softmax and gradients) exist at once: compute rows in chunks with
    # checkpoint.
    Expected(
        name="mosaics",
        cause=(
            r"activation",
            r"rows_loss",
            r"similarit",
            r"cross_entropy",
            r"softmax",
            r"intermediate",
            r"saved (tensor|for backward)",
            r"graphs\.py:2(1[89]|2\d|3\d)\b",
        ),
        near=(r"peak memory", r"MosaicMatcher", r"training_step", r"forward"),
        fix=(
            r"chunk",
            r"checkpoint",
            r"(smaller|fewer|reduce|lower|split|micro)[^.]*(batch|patch|matrix)",
            r"split",
            r"accumulate_grad_batches",
            r"piece|block|tile",
        ),
        near_fix=(r"bf16|bfloat16|float16|half|precision", r"in.?place", r"free"),
        accuse=(r"rows_loss", r"similarit", r"activation[^.]*(peak|most)"),
        is_note=True,
    ),
    # A callback holds a deep copy of the whole model as the best one (two while it replaces it): save it to disk.
    Expected(
        name="customs_forms",
        cause=(r"cop(y|ies)", r"deepcopy", r"KeepBest", r"best_model", r"twice|two models|second model"),
        near=(r"parameter", r"weights", r"model (size|memory)", r"callback"),
        fix=(
            r"ModelCheckpoint",
            r"(save|write)\w*[^.]*(disk|file|checkpoint)",
            r"checkpoint",
            r"(without|remove|drop|avoid|delete|free)[^.]*cop(y|ies)",
            r"state_dict",
        ),
        near_fix=(r"KeepBest", r"referen", r"half|bf16|bfloat16"),
        accuse=(r"deepcopy", r"KeepBest", r"best_model", r"(second|another|extra) cop(y|ies)"),
        is_note=True,
    ),
    # The callback Diary keeps the photos of every batch as numpy arrays: keep numbers only, a few examples, or
    # write to disk.
    Expected(
        name="vineyards",
        cause=(
            r"leak",
            r"memory[^.]*(grow|grew|rise|rose|increas|climb)",
            r"(grow|grew)[^.]*(memory|MB|MiB|GB|GiB)",
            r"Diary",
            r"entries",
            r"(kept|keep|held|hold)\w*[^.]*(arrays?|photos?|objects?|batch)",
        ),
        near=(r"numpy", r"callback", r"peak memory"),
        fix=(
            r"clear",
            r"entries",
            r"bound|limit|deque|last (few|n)",
            r"(write|save|spill|flush)\w*[^.]*(disk|file)",
            r"(keep|store|append)[^.]*(number|scalar|only|summary|less|few)",
            r"(without|stop|do not|don't|remove)[^.]*(keep|stor|append|photo|arrays?|cop)",
        ),
        near_fix=(r"Diary", r"referen", r"callback"),
        accuse=(r"leak", r"memory[^.]*(grow|grew|rise|rose|climb)", r"Diary"),
    ),
    # The data set in a persistent worker caches every photo without bound: bound the cache (lru_cache) or drop
    # it.
    Expected(
        name="fossils",
        cause=(
            r"worker[^.]*(grow|grew|leak|memory|cache|rise|rose)",
            r"(grow|grew|leak|memory|cache)[^.]*worker",
            r"Fossils",
            r"\bcach",
        ),
        near=(r"leak", r"memory[^.]*(grow|grew|rise|rose|climb)", r"data ?set", r"persistent_workers"),
        fix=(r"\bcach", r"lru", r"bound|maxsize", r"evict"),
        near_fix=(r"persistent_workers", r"fewer workers|num_workers", r"Fossils", r"data ?set"),
        accuse=(
            r"worker[^.]*(grow|grew|leak)",
            r"(grow|grew|leak)[^.]*worker",
            r"\bcach\w* [^.]*(grow|bound)",
            r"leak",
        ),
    ),
    # Rank 1 unpacks lzma records in its half of the archive while rank 0 waits: unpack them once, share them
    # evenly, use workers.
    Expected(
        name="auroras",
        cause=(
            r"rank[^.]*(data|load|fetch|batch|Magnetograms|__getitem__|lzma|decompress|input)",
            r"(data|load|fetch|Magnetograms|__getitem__|lzma|decompress|input)[^.]*rank",
        ),
        near=(
            r"straggl",
            r"rank 1",
            r"wait[^.]*rank|rank[^.]*wait",
            r"imbalance",
            r"Magnetograms",
            r"__getitem__",
            r"lzma",
            r"input-bound",
            r"waits? for data",
        ),
        fix=(
            r"(decompress|unpack|decod|lzma)",
            r"num_workers",
            r"(even|equal|balanc|shuffl|distribut|spread|interleav)\w*",
            r"DistributedSampler",
            r"prefetch|precomput|in advance|once|cache",
        ),
        near_fix=(r"rank 1", r"Magnetograms", r"__getitem__"),
        accuse=(
            r"straggl",
            r"rank 1[^.]*(slow|behind|data|load)",
            r"rank 0 waits",
            r"lzma",
            r"Magnetograms\.__getitem__",
        ),
    ),
    # A callback on rank 0 evaluates 256 reference comets after each batch, rank 1 waits: every N steps, or share
    # it.
    Expected(
        name="comets",
        cause=(
            r"ReferenceComets",
            r"rank[^.]*(callback|on_train_batch_end|hook|extra)",
            r"(callback|on_train_batch_end|hook)[^.]*rank",
        ),
        near=(
            r"straggl",
            r"rank 0",
            r"wait[^.]*rank|rank[^.]*wait",
            r"imbalance",
            r"callback",
            r"on_train_batch_end",
        ),
        fix=(
            r"every[ _](n|few|\d+|so many|hundred)\w*",
            r"less (often|frequent)|more rarely|fewer",
            r"(all|every|both|each) ranks?",
            r"(remove|drop|move|shorten)[^.]*(callback|ReferenceComets|on_train_batch_end|work)",
            r"validation",
        ),
        near_fix=(r"ReferenceComets", r"callback", r"on_train_batch_end", r"balanc"),
        accuse=(r"ReferenceComets", r"straggl", r"rank 1 waits", r"rank 0[^.]*(slow|behind)"),
    ),
    # Rank 0 alone holds 500 MB of charts: memory-map them, or load the few that the picture needs at the end.
    Expected(
        name="sea_ice",
        cause=(
            r"rank[^.]*(memory|MB|MiB|GB|GiB|RSS)",
            r"(memory|MB|MiB|GB|GiB|RSS)[^.]*rank",
            r"IceNet\.gallery|self\.gallery|\bgallery\b",
        ),
        near=(r"imbalance", r"uneven", r"on_fit_start", r"peak memory"),
        fix=(
            r"gallery",
            r"mmap|memmap|memory-map",
            r"on_fit_start",
            r"(only|few|fewer|less|later|lazy|lazily|at the end|on demand)",
            r"rank 0[^.]*(keep|hold|alloc|load|only)",
            r"(keep|hold|alloc|load)\w*[^.]*rank 0",
        ),
        near_fix=(r"balanc", r"shard|split|share|spread|distribut", r"rank 0"),
        accuse=(
            r"rank[^.]*(more|most|uneven|imbalance)[^.]*(memory|MB|MiB|GB|GiB)",
            r"memory[^.]*(uneven|imbalance)",
            r"gallery",
        ),
        is_note=True,
    ),
    # Gradients are all-reduced in each of four micro-batches: no_sync for all but the last, or
    # accumulate_grad_batches.
    Expected(
        name="tram_delays",
        cause=(
            r"all-?_?reduc",
            r"(sync|exchang|communicat)\w*[^.]*(each|every|per|4|four|several|micro)",
            r"(gradient|DDP)[^.]*(sync|exchang|communicat)",
            r"(sync|exchang|communicat)\w*[^.]*gradient",
            r"no_sync",
        ),
        near=(r"communicat", r"\bgloo\b", r"\bsync", r"backward", r"\bDDP\b"),
        fix=(r"no_sync", r"block_backward_sync", r"accumulate_grad_batches", r"no_backward_sync"),
        near_fix=(
            r"(sync|all-?_?reduc|exchang)\w*[^.]*(once|last|fewer|less)",
            r"gradient_as_bucket_view|bucket",
            r"compress|fp16|bf16|comm_hook",
        ),
        accuse=(
            r"no_sync",
            r"(all-?_?reduc|sync|exchang)\w*[^.]*(each|every|per|4|four|several)[^.]*(micro|backward)",
        ),
    ),
)
