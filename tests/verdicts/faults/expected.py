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
        cause=(r"metric|auroc|torchmetrics|\bcompute\b",),
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
    ),
)
