"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

GROWS: Final = r"grow|leak|accumulat|\bkeeps? .* (alive|live)|rises|increas"

EXPECTED: Final = (
    Expected(
        name="slow_decode",
        script="data.py",
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
        script="data.py",
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
        script="data.py",
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
        script="data.py",
        cause=(r"padd(ed|ing)|pad tokens?|pad values?",),
        near=(r"(constant|same|identical|repeated) (value|token)s?|zeros? .*(batch|input|token)",),
        fix=(r"bucket|sort.*length|pad .*(longest|batch)|longest|dynamic|length|pack|nested|group",),
        near_fix=(r"padd|collate",),
    ),
    Expected(
        name="anomaly_detection",
        script="host.py",
        cause=(r"anomaly",),
        near=(r"debug",),
        fix=(r"detect_anomaly|anomaly",),
    ),
    Expected(
        name="live_objects",
        script="host.py",
        cause=(r"garbage|\bGC\b|gc\.|collector pause|cyclic",),
        near=(r"Replay|on_train_batch_end|callback",),
        fix=(r"\bgc\b|freeze|threshold|array|tensor|numpy|fewer objects|Replay",),
        near_fix=(r"callback|on_train_batch_end|objects",),
    ),
    Expected(
        name="metric_each_step",
        script="host.py",
        cause=(r"metric|auroc|\.compute\b|compute\(\)",),
        near=(r"Ranked\.training_step|outside.*module|training_step.*(itself|self)",),
        fix=(r"metric|auroc|every.*(step|n\b)|less often|epoch|on_epoch|\bcompute\(\)",),
        near_fix=(r"Ranked|training_step",),
    ),
    Expected(
        name="rewriting_logger",
        script="host.py",
        cause=(r"logger|logging|log_metrics|JsonLogger|metrics\.json",),
        near=(r"\blog\b|file|write|disk|json|callback",),
        fix=(r"log_every_n_steps|append|less often|rewrit|log_metrics|logger",),
        near_fix=(r"\blog|write|file",),
    ),
    Expected(
        name="slow_hook",
        script="host.py",
        cause=(r"forward hook|histogram|module hook|\bhooks?\b.*(module|forward|block|Residual)",),
        near=(r"\bhooks?\b",),
        fix=(r"hook|histogram",),
        accuse=(r"forward hook|histogram|module hook",),
    ),
    Expected(
        name="frequent_validation",
        script="host.py",
        cause=(r"validation|validat|val_check",),
        near=(r"evaluation|\beval\b|on_train_batch_end",),
        fix=(r"val_check_interval|check_val_every_n|limit_val_batches|validate less|less often",),
        near_fix=(r"validation",),
    ),
    Expected(
        name="second_profiler",
        script="host.py",
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
        script="host.py",
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
        script="memory.py",
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
        script="memory.py",
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
        script="memory.py",
        cause=(r"activations?",),
        near=(r"peak memory|memory-bound|memory",),
        fix=(r"checkpoint",),
        near_fix=(r"batch|sequence|bf16|precision|recompute|offload",),
        accuse=(r"activations?.*(most|\d+%|dominat|GiB|MiB)", r"(peak|memory).*activations?"),
    ),
    Expected(
        name="looped_attention",
        script="compute.py",
        cause=(r"attention|softmax|masked_fill|python loop|(small|many|tiny) (op|kernel|operation)",),
        near=(r"layers?\b|compute-bound|forward",),
        fix=(r"scaled_dot_product_attention|SDPA|flash|fused|FlexAttention",),
        near_fix=(r"attention|torch\.compile|vectori[sz]|loop",),
        accuse=(r"scaled_dot_product|unfused|softmax|masked_fill|python loop|(small|many|tiny) (op|kernel|operation)",),
    ),
    Expected(
        name="attached_generator",
        script="compute.py",
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
        script="compute.py",
        cause=(r"\bmixer\b|Mixer",),
        near=(r"compute-bound|matri(x|ces)|matmul|addmm|mm\b|linear",),
        fix=(r"bf16|precision|mixer|torch\.compile|GPU|accelerator|smaller|width|tensor cores|TF32",),
        near_fix=(r"matmul|module|timeline|profile",),
        accuse=(r"mixer.*(most|dominat)", r"(most|dominat).*mixer"),
    ),
    Expected(
        name="small_batch",
        script="compute.py",
        cause=(
            r"(?<!profiler )overhead|batch size|small(er)? batch|batch of 2",
            r"(small|tiny|short|many) (op|kernel)|dispatch|launch",
        ),
        near=(r"python|host-bound|CPU-bound|framework|throughput",),
        fix=(r"(larger|bigger|increase|raise|grow).{0,30}batch|batch.?size|accumulate",),
        near_fix=(r"torch\.compile|fuse|batch|foreach",),
        accuse=(r"(?<!profiler )overhead|batch size|small(er)? batch|(small|tiny|short|many) (op|kernel)|dispatch",),
    ),
)
