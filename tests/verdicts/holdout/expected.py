"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

WAITS: Final = r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader"
GROWS: Final = r"grow|leak|accumulat|\bkeeps? .* (alive|live)|rises|increas"

EXPECTED: Final = (
    Expected(
        name="slow_collate",
        script="data.py",
        cause=(r"collat|\bassemble\b",),
        near=(WAITS,),
        fix=(r"collat|assemble|stack|vectori[sz]",),
        near_fix=(r"num_workers|workers|dataset|batch",),
    ),
    Expected(
        name="many_workers",
        script="data.py",
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
        script="data.py",
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
        script="host.py",
        cause=(r"threads?.*(core|CPU|oversubscri|more|32)|oversubscri|set_num_threads|32 threads",),
        near=(r"threads?|context switch|contention",),
        fix=(r"OMP_NUM_THREADS|set_num_threads|num_threads",),
        near_fix=(r"threads?",),
    ),
    Expected(
        name="forced_collection",
        script="host.py",
        cause=(r"garbage|\bGC\b|gc\.collect",),
        near=(r"on_train_batch_end|Collecting",),
        fix=(r"gc\.collect|remove.*collect|\bgc\b|garbage",),
        near_fix=(r"on_train_batch_end|hook|Collecting",),
    ),
    Expected(
        name="scalar_loop",
        script="host.py",
        cause=(r"\.item\(|_local_scalar_dense|scalar|element by element|is_invalid|isfinite|tolist",),
        near=(r"Checked|training_step|synchroni[sz]|python",),
        fix=(r"\.item|is_invalid|isfinite|vectori[sz]|tensor (op|comparison)|sum\(\)|_local_scalar|scalar",),
        near_fix=(r"training_step|python|Checked|loop",),
        accuse=(r"\.item\(|_local_scalar_dense|scalar|python|synchroni[sz]",),
    ),
    Expected(
        name="log_volume",
        script="host.py",
        cause=(r"self\.log|log_dict|logg|\.log\b|\blog (call|value|metric)",),
        near=(r"Verbose|training_step|python|many metrics|connector",),
        fix=(r"log_dict|fewer|log less|less often|on_epoch|self\.log|log_every|\.log\b|logg",),
        near_fix=(r"training_step|python|metric",),
        accuse=(r"self\.log|log_dict|logg|\.log\b|\blog (call|value|metric)",),
    ),
    Expected(
        name="slow_callback",
        script="host.py",
        cause=(r"Heartbeat",),
        near=(r"callback|on_train_batch_end",),
        fix=(r"Heartbeat",),
        near_fix=(r"callback|on_train_batch_end",),
    ),
    Expected(
        name="copied_average",
        script="host.py",
        cause=(r"deepcopy|AverageWeights",),
        near=(r"callback|on_train_batch_end",),
        fix=(r"deepcopy|AverageWeights|in.place|lerp",),
        near_fix=(r"callback|on_train_batch_end|less often",),
    ),
    Expected(
        name="frequent_checkpoints",
        script="host.py",
        cause=(r"checkpoint",),
        near=(r"callback|on_train_batch_end|\bsav(e|ing)\b|writ",),
        fix=(r"every_n_train_steps|less often|every_n|ModelCheckpoint|async|train_time_interval|save_weights_only",),
        near_fix=(r"checkpoint|callback",),
        accuse=(r"checkpoint.*(%|often|each|every|takes)|callback",),
    ),
    Expected(
        name="tiny_operators",
        script="host.py",
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
        script="host.py",
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
        script="memory.py",
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
        script="memory.py",
        cause=(rf"workers?.*({GROWS})", rf"({GROWS}).*worker", r"cach(e|ed|ing)\b.*(worker|dataset|grow)"),
        near=(GROWS, r"memory of .*process|child processes|worker"),
        fix=(r"cach|dataset|__getitem__|persistent_workers|limit",),
        near_fix=(r"worker|memory",),
        accuse=(r"worker.*(grow|leak|memory|RSS)", r"(grow|leak).*(memory|RSS|MiB|worker)|(memory|RSS).*(grow|leak)"),
    ),
    Expected(
        name="optimizer_state",
        script="memory.py",
        cause=(
            r"optimi[sz]er state|Adam.*(state|memory)|optimi[sz]er.*(memory|peak|GiB|MiB)|(memory|peak).*optimi[sz]er",
        ),
        near=(r"optimi[sz]er|memory",),
        fix=(r"8-?bit|SGD|Adafactor|shard|ZeRO|FSDP|bf16|low.?rank|LoRA|Muon|Lion|factored|optimizer with less state",),
        near_fix=(r"optimi[sz]er|memory",),
        accuse=(r"optimi[sz]er state",),
    ),
    Expected(
        name="retained_graph",
        script="memory.py",
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
        script="compute.py",
        cause=(r"float64|double|64-bit",),
        near=(r"precision|dtype|compute-bound",),
        fix=(r"float32|\.float\(\)|32-true|float64|double",),
        near_fix=(r"precision|bf16|dtype",),
        accuse=(r"float64|double|64-bit",),
    ),
    Expected(
        name="memory_format",
        script="compute.py",
        cause=(r"channels.last|memory.format|NCHW|conv\w*.*(layout|format)|convolution",),
        near=(r"compute-bound|layout|reorder|copy|conv",),
        fix=(r"channels.last",),
        near_fix=(r"memory.format|bf16|conv|layout",),
        accuse=(r"channels.last|memory.format|NCHW|layout|reorder",),
    ),
)
