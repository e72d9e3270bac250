"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

WAITS: Final = r"input-bound|waits? for (data|batch|the (next )?batch|its data)|data (wait|load)|dataloader"
GROWS: Final = r"grow|leak|accumulat|\bkeeps?\b|\bkept\b|rises|increas"
SMALL: Final = r"(small|tiny|many|short) (op|call|kernel)|(?<!profiler )overhead|host-bound|launch|dispatch|python"
# Who keeps the batches, or where they are made.
LOADER: Final = r"itertools|\bcycle|loader|\bbatches\b|\bunlabeled\b|training_step|collat|\bstack\b|memory\.py:\d"
COLLECTIVE: Final = r"all.?reduc|collective|synchroni[sz]|communicat|reduction"

EXPECTED: Final[tuple[Expected, ...]] = (
    Expected(
        name="scanned_histories",
        script="data.py",
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
        script="data.py",
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
        script="data.py",
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
        script="data.py",
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
        script="host.py",
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
        script="host.py",
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
            r"(on_after_batch_transfer|augment\w*|RandomView|grid_sample\w*).* ([3-9]\d|100)%",
        ),
    ),
    Expected(
        name="group_per_parameter",
        script="host.py",
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
        script="compute.py",
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
        script="compute.py",
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
        script="compute.py",
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
        script="compute.py",
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
        script="memory.py",
        cause=(
            rf"({GROWS}).*({LOADER})",
            rf"({LOADER}).*({GROWS})",
            r"itertools|\bcycle\b",
        ),
        near=(GROWS,),
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
        script="memory.py",
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
        script="memory.py",
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
        script="ranks.py",
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
        script="ranks.py",
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
)
