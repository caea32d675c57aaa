"""The configuration classes, written by scripts/python_configs.py from what the program knows about its settings: do not edit."""

# ruff: noqa: E501

from dataclasses import dataclass, field
from typing import Any

from rlhf._config import Config as _Config
from rlhf._config import with_names as _with_names


@dataclass
class _Training(_Config):
    """What all trainers have."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder for the model, the metrics and the resolved configuration"})
    dataset_weights: list[float] | None = field(default=None, metadata={"help": "Sampling weights of several datasets, a number for each [default: every row is equally likely]"})
    dataset_columns: list[str] | None = field(default=None, metadata={"help": "Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none ignores a field"})
    eval_split_size: float | None = field(default=None, metadata={"help": "Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to evaluate on"})
    data_split: str | None = field(default=None, metadata={"help": "Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares are disjoint"})
    data_split_seed: int = field(default=42, metadata={"help": "Seed of `data_split`; must be the same for sft, reward and ppo"})
    chat_template_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Variables of the chat template for every conversation, as JSON such as {\"enable_thinking\": false}; where rows have `chat_template_kwargs`, these take precedence by name"})
    optim: str = field(default='adamw_torch', metadata={"help": "Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16"})
    lr_scheduler_type: str = field(default='linear', metadata={"help": "Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts, polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup"})
    warmup_steps: float = field(default=0, metadata={"help": "Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and with `grpo` and `rloo`"})
    warmup_ratio: float = field(default=0.0, metadata={"help": "Warm-up as a share of all updates, rounded up"})
    lr_end: float | None = field(default=None, metadata={"help": "Final learning rate [default: 0, and 1e-7 with `polynomial`]"})
    min_lr_rate: float | None = field(default=None, metadata={"help": "Final learning rate as a share of the peak, in place of `lr_end`"})
    num_cycles: float | None = field(default=None, metadata={"help": "Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts` 1, its decays]"})
    num_decay_steps: int | None = field(default=None, metadata={"help": "Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps with `rlhf grpo` and `rlhf rloo`"})
    decay_type: str = field(default='cosine', metadata={"help": "Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt"})
    power: float = field(default=1.0, metadata={"help": "Power of the `polynomial` schedule"})
    weight_decay: float = field(default=0.0, metadata={"help": "Decoupled weight decay"})
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none"})
    adam_beta2: float = field(default=0.999, metadata={"help": "AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own"})
    adam_epsilon: float = field(default=1e-08, metadata={"help": "AdamW's epsilon; Adafactor's is of its own"})
    eval_steps: float | str | None = field(default=None, metadata={"help": "Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each `epoch`, before the first, and after the last"})
    metric_for_best_model: str | None = field(default=None, metadata={"help": "Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation; without evaluations, every `save_steps`"})
    greater_is_better: bool | None = field(default=None, metadata={"help": "Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL]"})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Replace the run in `output_dir`"})
    seed: int = field(default=42, metadata={"help": "Seed of everything random"})
    bf16: bool = field(default=False, metadata={"help": "Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`)"})
    fp16: bool = field(default=False, metadata={"help": "Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer"})
    initial_scale_power: int = field(default=16, metadata={"help": "Initial loss scale with `fp16`, as a power of 2"})
    loss_scale_window: int = field(default=1000, metadata={"help": "Consecutive optimizer steps without an overflow after which the loss scale is doubled"})
    hysteresis: int = field(default=2, metadata={"help": "Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips its optimizer step"})
    min_loss_scale: float = field(default=1.0, metadata={"help": "Smallest loss scale"})
    device: str = field(default='auto', metadata={"help": "Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one"})
    save_dtype: str = field(default='auto', metadata={"help": "Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints and adapters do not depend on it: auto, float32, bfloat16, float16"})
    max_shard_size: str = field(default='50GB', metadata={"help": "Maximum size of each file of saved weights, such as 5GB or 500MB"})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute each layer in the backward pass instead of storing its activations: less memory, more time"})
    max_tokens_per_micro_batch: str | None = field(default=None, metadata={"help": "Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change the result [default: by the available memory]"})
    offload: list[str] | None = field(default=None, metadata={"help": "Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer, models, all"})
    offload_dir: str | None = field(default=None, metadata={"help": "Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default: `output_dir`]"})
    report_to: None | str | list[str] = field(default='none', metadata={"help": "Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and each tracker whose Python package is installed", "aliases": ["--log_with"]})
    tensorboard_tags: str = field(default='plain', metadata={"help": "Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's trainers, such as `train/objective/kl` and `eval/loss`: plain, trl"})
    run_name: str | None = field(default=None, metadata={"help": "Name of the run in trackers [default: the name of `output_dir`]"})
    project: str | None = field(default=None, metadata={"help": "Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME, else rlhf]", "aliases": ["--tracker_project_name"]})
    tracker_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{\"wandb\": {\"entity\": \"team\"}}'"})
    log_model: bool = field(default=False, metadata={"help": "Upload the model in `output_dir` to the trackers at the end of the run"})
    num_threads: int | None = field(default=None, metadata={"help": "Number of threads for tensor operations [default: one per core]"})
    disable_tqdm: bool | None = field(default=None, metadata={"help": "Hide the progress bar"})
    no_report: bool = field(default=False, metadata={"help": "Do not write `report.html`, a page that shows the run, at its end"})
    save_steps: float | str | None = field(default=500, metadata={"help": "Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and after the last. If unset, only a run that stops early saves one"})
    save_total_limit: int | None = field(default=None, metadata={"help": "Number of newest checkpoints to keep [default: all]"})
    resume_with_changed_inputs: bool = field(default=False, metadata={"help": "Resume even if data or models have changed since the run started"})
    push_to_hub: bool = field(default=False, metadata={"help": "Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN"})
    hub_model_id: str | None = field(default=None, metadata={"help": "Repository to push to, such as me/my-model; created if it does not exist", "aliases": ["--push_to_hub_model_id"]})
    hub_revision: str | None = field(default=None, metadata={"help": "Branch to push to, created if it does not exist [default: main]"})
    hub_private_repo: bool | None = field(default=None, metadata={"help": "Whether a new repository is private [default: as its owner has set, usually public]"})
    hub_strategy: str = field(default='every_save', metadata={"help": "When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best model: end, every_save, best"})
    hub_always_push: bool = field(default=False, metadata={"help": "Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out"})
    hub_token: str | None = field(default=None, metadata={"help": "Access token with write access [default: HF_TOKEN, which no list of processes shows]", "aliases": ["--push_to_hub_token"]})
    zero_stage: str = field(default='0', metadata={"help": "Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0 nothing: 0, 1, 2, 3"})
    dist_timeout: int = field(default=1800, metadata={"help": "Maximum seconds that a rank waits for the others", "aliases": ["--ddp_timeout"]})
    logging_strategy: str = field(default='steps', metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    logging_dir: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    logging_first_step: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    logging_nan_inf_filter: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    log_on_each_node: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    log_level: str = field(default='passive', metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    log_level_replica: str = field(default='warning', metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    include_num_input_tokens_seen: str = field(default='no', metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    include_tokens_per_second: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    include_for_metrics: list[str] | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    include_inputs_for_metrics: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to"})
    trackio_space_id: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs"})
    trackio_bucket_id: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs"})
    trackio_static_space_id: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs"})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataset_batch_size: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataloader_pin_memory: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataloader_persistent_workers: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataloader_prefetch_factor: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataloader_multiprocessing_context: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    dataloader_in_order: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    remove_unused_columns: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    length_column_name: str = field(default='length', metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    average_tokens_across_devices: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    accelerator_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    ddp_find_unused_parameters: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    ddp_bucket_cap_mb: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    ddp_broadcast_buffers: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    ddp_static_graph: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    ddp_backend: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    save_on_each_node: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    eval_use_gather_object: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    fsdp_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    fsdp_min_num_params: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    fsdp_transformer_layer_cls_to_wrap: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    dispatch_batches: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    split_batches: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    ray_scope: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case"})
    torch_compile: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    torch_compile_backend: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    torch_compile_mode: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    torchdynamo: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    use_liger_kernel: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    use_liger: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    use_liger_loss: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    liger_kernel_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    use_cache: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    torch_empty_cache_steps: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    auto_find_batch_size: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    debug: None | str | list[str] = field(default='', metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    skip_memory_metrics: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    eval_accumulation_steps: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    eval_do_concat_batches: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    batch_eval_metrics: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    prediction_loss_only: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    low_cpu_mem_usage: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    save_only_model: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one"})
    enable_jit_checkpoint: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one"})
    restore_callback_states_from_checkpoint: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one"})
    do_train: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: the command decides what is done"})
    do_eval: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: the command decides what is done"})
    do_predict: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: the command decides what is done"})
    push_to_hub_organization: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME"})
    full_determinism: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: two runs with the same seed are identical"})
    half_precision_backend: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    fp16_backend: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    fp16_opt_level: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    use_legacy_prediction_loop: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    tpu_num_cores: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    tpu_metrics_debug: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    mp_parameters: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    jit_mode_eval: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    use_ipex: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it has no meaning for this program"})
    eval_strategy: str = field(default='no', metadata={"help": "Of TRL or transformers", "aliases": ["--evaluation_strategy"]})
    save_strategy: str = field(default='steps', metadata={"help": "Of TRL or transformers"})
    use_cpu: bool = field(default=False, metadata={"help": "Of TRL or transformers", "aliases": ["--no_cuda"]})
    trust_remote_code: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: code that comes with a model is never run"})
    adafactor: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: set optim = adafactor"})
    optim_args: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the optimizer's settings are flags of their own"})
    optim_target_modules: None | str | list[str] = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the optimizer's settings are flags of their own"})
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers"})
    label_smoothing_factor: float = field(default=0.0, metadata={"help": "Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed"})
    neftune_noise_alpha: float | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: no noise is added to embeddings"})
    bf16_full_eval: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training"})
    fp16_full_eval: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training"})
    tf32: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: float32 products keep full precision"})
    eval_delay: float = field(default=0, metadata={"help": "Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start"})
    eval_on_start: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update"})
    load_best_model_at_end: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its folder `best`"})
    ignore_data_skip: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left"})
    data_seed: int | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: seed is the seed of everything random"})
    dataloader_drop_last: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: every row is trained on"})
    label_names: list[str] | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: columns are found by their names"})
    train_sampling_strategy: str = field(default='random', metadata={"help": "Of TRL or transformers; expected none or random: rows are drawn in a random order"})
    group_by_length: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: rows are drawn in a random order"})
    parallelism_config: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage"})
    fsdp: None | str | list[str] = field(default='', metadata={"help": "Of TRL or transformers"})
    deepspeed: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers"})
    deepspeed_config: str | None = field(default=None, metadata={"help": "Of TRL or transformers"})
    accelerate_config: str | None = field(default=None, metadata={"help": "Of TRL or transformers"})
    local_rank: int = field(default=-1, metadata={"help": "Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment"})
    past_index: int = field(default=-1, metadata={"help": "Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept"})
    save_safetensors: bool | None = field(default=True, metadata={"help": "Of TRL or transformers; expected none or true: weights are written as safetensors"})
    use_mps_device: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: device selects where to compute"})
    dataset_mixture: str | None = field(default=None, metadata={"help": "Of TRL or transformers"})
    num_processes: int | None = field(default=None, metadata={"help": "Number of ranks on this machine, which the program starts [default: those of the launcher that has started this process, else one]"})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint"})


@dataclass
class _Supervised(_Training):
    """What trainers without rewards have."""

    eos_token: str | None = field(default=None, metadata={"help": "The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat template [default: the tokenizer's]"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches of each rank per optimizer step"})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Epochs over the dataset; no effect if `max_steps` is set"})
    max_steps: int = field(default=-1, metadata={"help": "Number of optimizer steps"})
    logging_steps: int = field(default=10, metadata={"help": "Optimizer steps between two logged lines of metrics"})
    offload_optimizer: bool = field(default=False, metadata={"help": "`offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the next two"})
    activation_offloading: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest"})


@dataclass
class _Distillation(_Supervised):
    """What trainers with a teacher have."""

    teacher_model_name_or_path: str | None = field(default=None, metadata={"help": "Causal language model to learn from, the teacher, which has the student's tokenizer: a folder or a hub name. It is frozen"})
    teacher_model_revision: str = field(default='main', metadata={"help": "Branch, tag or commit of `teacher_model_name_or_path` on the hub"})
    teacher_dtype: str | None = field(default=None, metadata={"help": "Dtype of the teacher's weights in memory [default: `dtype`]: auto, float32, bfloat16, float16"})
    teacher_load_in_4bit: bool | None = field(default=None, metadata={"help": "Hold the teacher's linear layers in 4 bits [default: `load_in_4bit`, which is for the teacher also without `use_peft`]"})
    teacher_load_in_8bit: bool | None = field(default=None, metadata={"help": "The same in 8 bits [default: `load_in_8bit`]"})
    teacher_bnb_4bit_quant_type: str | None = field(default=None, metadata={"help": "Data type of the teacher's 4 bits [default: `bnb_4bit_quant_type`]: nf4, fp4"})
    teacher_use_bnb_nested_quant: bool | None = field(default=None, metadata={"help": "Quantize the scales of the teacher's 4-bit weights too [default: `use_bnb_nested_quant`]"})
    max_length: int | None = field(default=1024, metadata={"help": "Maximum tokens of a prompt with the response of its row, which are truncated at their start; none: those of the models. No effect where all responses are sampled"})
    max_prompt_length: int | None = field(default=None, metadata={"help": "Maximum tokens of a prompt [default: the models' context minus `response_length`]"})
    long_prompts: str = field(default='error', metadata={"help": "Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side: error, drop, truncate_left, truncate_right"})
    train_batch_size: int | None = field(default=None, metadata={"help": "Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the number of ranks]"})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with `train_batch_size`]"})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Rows per forward pass in an evaluation"})
    log_completions: bool = field(default=False, metadata={"help": "Print and save sampled responses with each logged line of metrics; their score is the teacher's mean log-probability of a token"})
    num_completions_to_print: int | None = field(default=None, metadata={"help": "Number of responses of `log_completions` [default: 5]"})
    seq_kd: bool = field(default=False, metadata={"help": "In steps that are not on-policy, the teacher samples the responses"})
    top_k: int = field(default=0, metadata={"help": "Sample from this many most likely tokens only; 0 for all"})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all"})
    min_p: float | None = field(default=None, metadata={"help": "Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Penalty on tokens that are in the prompt or the response already; 1 for none"})
    min_new_tokens: int = field(default=0, metadata={"help": "Minimum tokens of a response: nothing ends it before"})
    stop_strings: list[str] | None = field(default=None, metadata={"help": "End a response with the token that completes this text; repeat the flag for several texts"})
    logprobs_of: str = field(default='policy', metadata={"help": "Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered"})
    local_rollout_forward_batch_size: int = field(default=64, metadata={"help": "Sequences of a rank that are decoded together"})
    ds3_gather_for_generation: bool = field(default=True, metadata={"help": "Gather the whole parameters of a sharded model once for the responses of an update; `false` gathers them layer by layer for each token, with less memory and more time"})
    loss_type: str = field(default='jsd', metadata={"help": "Loss of a token: jsd, reverse_kl_advantage"})
    loss_top_k: int = field(default=0, metadata={"help": "Compare the teacher's likeliest tokens only, this many in each place; 0 compares the whole vocabulary"})
    loss_add_tail: bool = field(default=True, metadata={"help": "With `loss_top_k`, all other tokens together are one more outcome; otherwise the probabilities of the `loss_top_k` are scaled to sum to 1"})
    max_grad_norm: float | None = field(default=1.0, metadata={"help": "Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice"})
    shuffle_dataset: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or true: rows are drawn in a random order"})
    padding_free: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    eval_packing: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    router_aux_loss_coef: float | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts"})
    pad_token: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: nothing is padded"})
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: teacher_model_revision, teacher_dtype and teacher_load_in_4bit set what they have"})
    chat_template_path: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the tokenizer's own template is used"})
    dataset_text_field: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or text: rows have a prompt, which a column of texts has not"})
    dataset_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: rows are read by their columns"})
    truncation_mode: str = field(default='keep_start', metadata={"help": "Of TRL or transformers; it has no effect here: rows that are too long are truncated at their start"})
    packing: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or false: a row has a prompt of its own"})
    assistant_only_loss: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or false: a row has a prompt of its own"})
    packing_strategy: str = field(default='bfd', metadata={"help": "Of TRL or transformers; it has no effect here: nothing is packed"})
    completion_only_loss: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or true: the response is learned, not the prompt"})
    max_tool_calling_iterations: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: responses have one turn, without tools"})
    log_unique_prompts: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: log_completions shows a few"})
    use_vllm: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_mode: str = field(default='colocate', metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_model_impl: str = field(default='vllm', metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_enable_sleep_mode: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_base_url: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_host: str = field(default='0.0.0.0', metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_port: int = field(default=8000, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_group_port: int = field(default=51216, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_max_model_length: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_device: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_dtype: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_max_model_len: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_enable_prefix_caching: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    use_transformers_continuous_batching: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    transformers_continuous_batching_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    use_transformers_paged: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    cache_implementation: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_structured_outputs_regex: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: responses are not constrained"})
    vllm_guided_decoding_regex: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: responses are not constrained"})
    generation_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: sampling has its own flags: top_k, top_p, min_p, repetition_penalty, min_new_tokens, stop_strings"})


@dataclass
class _Rollouts(_Training):
    """What trainers on sampled responses have."""

    reward_label: str | None = field(default=None, metadata={"help": "Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE"})
    reward_normalize: list[str] | None = field(default=None, metadata={"help": "Normalize a reward's scores: NAME=std divides by their running standard deviation, NAME=mean_std subtracts their running mean first"})
    reward_scale: list[str] | None = field(default=None, metadata={"help": "Factor of a reward's scores, as NAME=X; applied after `reward_normalize`"})
    reward_clip: list[str] | None = field(default=None, metadata={"help": "Clip a reward's scores to [-X, X], as NAME=X; applied after `reward_scale` and before `reward_weights`"})
    reward_pair: bool = field(default=False, metadata={"help": "Give prompt and response to reward models that are encoders as two segments, `[CLS] prompt [SEP] response [SEP]`, as OpenAssistant's DeBERTa reads them; without it as one text"})
    reward_label_column: str = field(default='label', metadata={"help": "Column of the dataset to send to a reward service as `labels`"})
    reward_batch_size: int = field(default=32, metadata={"help": "Responses per request to a reward service"})
    reward_concurrency: int = field(default=4, metadata={"help": "Concurrent requests to a reward service"})
    reward_timeout: float = field(default=120.0, metadata={"help": "Timeout in seconds for the next score of a reward program, or for a request to a service"})
    reward_retries: int = field(default=3, metadata={"help": "Retries after a reward program or service fails, before the run ends with an error"})
    max_tool_calling_iterations: int | None = field(default=None, metadata={"help": "Maximum number of turns with tool calls per response [default: no limit but its length]"})
    malformed_calls: str = field(default='text', metadata={"help": "Treatment of a turn with a broken tool call: plain text, as in TRL, or a failed call whose error the policy sees: text, error"})
    environment_failure_reward: float | None = field(default=None, metadata={"help": "Reward of a row whose environment dies [default: the run ends with an error]"})
    max_environments: int = field(default=64, metadata={"help": "Maximum number of sessions of environments that are open at a time; further rows wait"})
    tool_timeout: float = field(default=30.0, metadata={"help": "Time limit of a tool call in seconds"})
    reset_timeout: float = field(default=60.0, metadata={"help": "Time limit in seconds for the beginning and the end of a session, and for the start of its program"})
    tool_output_limit: str = field(default='64KB', metadata={"help": "Maximum size of the result of a tool call; a longer one is cut, with a mark that the policy sees"})
    tool_memory: str | None = field(default=None, metadata={"help": "Maximum address space of each process of tools and environments"})
    tool_processes: int | None = field(default=None, metadata={"help": "Number of processes and threads of the user above which tools and environments start no more"})
    tool_env: list[str] | None = field(default=None, metadata={"help": "Environment variables that tools and environments see although their names are those of secrets, such as HF_TOKEN"})
    long_prompts: str = field(default='error', metadata={"help": "Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side: error, drop, truncate_left, truncate_right"})
    apply_chat_template: bool = field(default=False, metadata={"help": "Put a prompt that is a string into the chat template, as a user message"})
    system_prompt: str | None = field(default=None, metadata={"help": "System message of every conversation that has none"})
    train_batch_size: int | None = field(default=None, metadata={"help": "Responses per update, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the number of ranks]"})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Maximum sequences of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with `train_batch_size`]"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches of each rank per update: an update samples this times `per_device_train_batch_size` responses per rank"})
    local_rollout_forward_batch_size: int = field(default=64, metadata={"help": "Sequences of a rank per forward pass without gradients"})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Epochs over the prompts; no effect if `total_episodes` is set"})
    num_sample_generations: int = field(default=10, metadata={"help": "Approximate number of sample tables to show during the run; one more at its end. 0 for none"})
    stop_token_id: int | None = field(default=None, metadata={"help": "Truncate responses after the token with this id"})
    top_k: int = field(default=0, metadata={"help": "Sample from this many most likely tokens only; 0 for all"})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all"})
    min_p: float | None = field(default=None, metadata={"help": "Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all"})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Penalty on tokens that are in the prompt or the response already; 1 for none"})
    min_new_tokens: int = field(default=0, metadata={"help": "Minimum tokens of a response: nothing ends it before"})
    stop_strings: list[str] | None = field(default=None, metadata={"help": "End a response with the token that completes this text; repeat the flag for several texts"})
    logprobs_of: str = field(default='policy', metadata={"help": "Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered"})
    missing_eos_penalty: float | None = field(default=None, metadata={"help": "Penalty subtracted from the score of a response without a stop token"})
    non_eos_penalty: bool = field(default=False, metadata={"help": "Replace the score of a response without a stop token by `penalty_reward_value`"})
    penalty_reward_value: float = field(default=-1.0, metadata={"help": "Score of a response without a stop token, with `non_eos_penalty`"})
    adap_kl_ctrl: bool = field(default=False, metadata={"help": "Adapt the KL coefficient after each update, so that the KL per response approaches `target`"})
    target: float = field(default=6.0, metadata={"help": "Target KL per response of `adap_kl_ctrl`, in nats"})
    horizon: float = field(default=10000.0, metadata={"help": "Horizon of `adap_kl_ctrl` in responses; a smaller one adapts faster"})
    scale_rewards: str = field(default='group', metadata={"help": "Standard deviation by which the advantages of `grpo` are divided: that of each group, that of the whole update, or none: group, batch, none"})
    normalize_advantages: bool = field(default=False, metadata={"help": "Normalize the advantages of `rloo` to mean 0 and standard deviation 1 over the responses of an update"})
    multi_objective_aggregation: str = field(default='sum_then_normalize', metadata={"help": "Combination of several rewards: `sum_then_normalize` compares their weighted sums; `normalize_then_sum` compares each reward by itself within its group first, and normalizes the weighted sums over the update (GDPO): sum_then_normalize, normalize_then_sum"})
    dynamic_sampling: bool = field(default=False, metadata={"help": "Replace groups whose scores are all equal, from which nothing is learned, by groups of the next prompts (dynamic sampling, DAPO)", "aliases": ["--filter_groups"]})
    dynamic_filtering_reward_range: list[float] | None = field(default=None, metadata={"help": "Replace groups whose mean score is not between these two numbers, LOW,HIGH (OpenRLHF's dynamic filtering)"})
    max_num_gen_batches: int = field(default=10, metadata={"help": "Maximum batches of responses that an update samples for `dynamic_sampling` or `dynamic_filtering_reward_range`; groups that are still missing then are taken from those that were replaced"})
    sync_ref_model: bool = field(default=False, metadata={"help": "Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps"})
    ref_model_mixup_alpha: float = field(default=0.6, metadata={"help": "Share of the policy in the updated reference model; 1 replaces it by the policy"})
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled already are compared with the earlier one"})
    entropy_coef: float = field(default=0.0, metadata={"help": "Entropy bonus coefficient: this times the entropy is subtracted from the policy's loss"})
    use_adaptive_entropy: bool = field(default=False, metadata={"help": "Change the entropy bonus coefficient after each optimizer step: it rises by `entropy_coef_delta` while the entropy is at most `entropy_target`, and falls above it, where there is no bonus. `entropy_coef` is its initial value"})
    entropy_coef_min: float = field(default=0.0, metadata={"help": "Minimum coefficient of `use_adaptive_entropy`"})
    entropy_coef_max: float = field(default=1.0, metadata={"help": "Maximum coefficient of `use_adaptive_entropy`"})
    entropy_coef_delta: float = field(default=0.005, metadata={"help": "Change of the coefficient of `use_adaptive_entropy` in an optimizer step"})
    entropy_target: float = field(default=0.2, metadata={"help": "Target of `use_adaptive_entropy`: mean entropy per token, in nats; near that of the first updates"})
    target_kl: float | None = field(default=None, metadata={"help": "Stop an update's epochs after one whose last mini-batch has a KL per token to the sampling policy above 1.5 times this"})
    ratio_threshold: float | None = field(default=None, metadata={"help": "Skip the optimizer step of a mini-batch whose mean probability ratio is above this"})
    top_entropy_quantile: float = field(default=1.0, metadata={"help": "Share of the tokens, those of the highest entropy, that the policy's objective trains; takes one further forward pass if below 1"})
    off_policy_mask_threshold: float | None = field(default=None, metadata={"help": "Leave out responses with a negative advantage whose mean KL per token from the sampling policy is above this; takes one further forward pass"})
    sapo_temperature_pos: float = field(default=1.0, metadata={"help": "Temperature of the loss `sapo` where the advantage is positive"})
    sapo_temperature_neg: float = field(default=1.05, metadata={"help": "Temperature of the loss `sapo` where the advantage is negative"})
    vespo_k_pos: float = field(default=2.0, metadata={"help": "Power of the ratio in the loss `vespo` where the advantage is positive"})
    vespo_lambda_pos: float = field(default=3.0, metadata={"help": "Decay of the ratio in the loss `vespo` where the advantage is positive"})
    vespo_k_neg: float = field(default=3.0, metadata={"help": "Power of the ratio in the loss `vespo` where the advantage is negative"})
    vespo_lambda_neg: float = field(default=2.0, metadata={"help": "Decay of the ratio in the loss `vespo` where the advantage is negative"})
    clip_reward_value: float | None = field(default=None, metadata={"help": "Clip a response's whole score, scores of its tokens included, to plus or minus this when it becomes a reward"})
    reward_clip_range: list[float] | None = field(default=None, metadata={"help": "Clip a response's whole score to between these two numbers, LOW,HIGH"})
    eos_in_loss: str = field(default='always', metadata={"help": "Whether a response's end-of-sequence token is in the losses. Excluded, it still gets the score. `unless_pad` excludes it where DeepSpeed-Chat pads with it: for all models but Llama, and for a Llama whose padding token it is: always, unless_pad, never"})
    unsupervised_dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split"})
    unsup_coef: float = field(default=27.8, metadata={"help": "Coefficient of the language-modelling loss"})
    enable_ema: bool = field(default=False, metadata={"help": "Maintain a moving average of the policy's weights, and save it in the folder `ema`"})
    ema_beta: float = field(default=0.992, metadata={"help": "Decay of the moving average per optimizer step"})
    raw_logprobs: bool = field(default=False, metadata={"help": "Compute log-probabilities of the policy's own distribution, without `temperature`"})
    num_shared_layers: int | None = field(default=None, metadata={"help": "Number of lower layers that are frozen and shared with the reference model, so that memory holds them once"})
    early_stopping: bool = field(default=False, metadata={"help": "Stop an update's epochs at `target_kl`, which is 1 then unless it is set"})
    use_score_scaling: bool = field(default=False, metadata={"help": "Divide scores by the running standard deviation of all scores of the run"})
    use_score_norm: bool = field(default=False, metadata={"help": "With `use_score_scaling`, subtract the running mean of all scores of the run first"})
    score_clip: float | None = field(default=None, metadata={"help": "Clip scores to plus or minus this value, after `use_score_scaling`"})
    max_skipped_updates: int = field(default=3, metadata={"help": "Stop after this many consecutive updates in which every optimizer step was skipped because a loss or a gradient was not finite"})
    no_checks: bool = field(default=False, metadata={"help": "Skip the checks at the start of the run: first probability ratio, first KL, and decoding"})
    on_alarm: list[str] | None = field(default=None, metadata={"help": "Action when an alarm is raised, as NAME=ACTION; repeat the flag for several. NAME is an alarm, such as runaway_kl, or all, for every alarm that is not named. ACTION: warn; stop, which saves a checkpoint and ends the run; rollback, which continues from the last checkpoint before the metric began to move, with half the learning rate and other samples [default: all=warn]"})
    max_rollbacks: int = field(default=3, metadata={"help": "Rollbacks of a run, at most; the next alarm with that action stops it"})
    compute_fp32_loss: bool = field(default=True, metadata={"help": "Compute log-probabilities from float32 logits, for policy and reference model. Always on: `false` is refused"})
    print_answers_interval: int = field(default=1, metadata={"help": "Updates between two prints of `print_answers`"})
    log_rollouts: bool = field(default=False, metadata={"help": "Write all responses of every update to `output_dir/rollouts`, one Parquet file per update: tokens, scores, log-probabilities, values and advantages"})
    rollouts_limit: int | None = field(default=None, metadata={"help": "Number of newest updates whose rollouts are kept, with `log_rollouts` [default: all]"})
    enable_test_mode: bool = field(default=False, metadata={"help": "Stop after the update `test_stop_step`; learning rates are those of the whole run"})
    test_stop_step: int = field(default=0, metadata={"help": "Last update of `enable_test_mode`, counted from 0"})
    num_eval_prompts: int = field(default=128, metadata={"help": "Maximum prompts in an evaluation: the first of the split"})
    ds3_gather_for_generation: bool = field(default=True, metadata={"help": "Gather the policy's whole parameters once for the generation of an update where they are sharded; `false` gathers them layer by layer for each token, with less memory and more time"})
    logging_steps: float = field(default=10, metadata={"help": "Of TRL or transformers; it has no effect here: each update is logged"})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Of TRL or transformers; it has no effect here: an evaluation takes local_rollout_forward_batch_size prompts at a time"})
    dataset_prompt_column: str | None = field(default=None, metadata={"help": "Of TRL or transformers"})


@dataclass
class _Groups(_Rollouts):
    """What trainers on groups of responses have."""

    new_reward_head: bool = field(default=False, metadata={"help": "Add a randomly initialized score head to a reward model that has none"})
    reward_weights: list[float] | None = field(default=None, metadata={"help": "Weights of the rewards in their sum: NAME=X, separated by commas; X for all; or one X for each reward, in the order model, command, url, `reward_funcs` [default: 1]"})
    max_prompt_length: int | None = field(default=None, metadata={"help": "Maximum tokens of a prompt [default: the models' context minus `max_completion_length`]"})
    generation_batch_size: int | None = field(default=None, metadata={"help": "Responses per update over all ranks [default: those of an optimizer step]"})
    steps_per_generation: int | None = field(default=None, metadata={"help": "Micro-batches of `per_device_train_batch_size` per update [default: `gradient_accumulation_steps`]"})
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps, rounded up to whole updates [default: `num_train_epochs` over the prompts]"})
    total_episodes: int | None = field(default=None, metadata={"help": "Number of responses to train on, rounded up to whole updates, in place of `max_steps` [default: `num_train_epochs` times the prompts and their responses]"})
    max_completion_length: int = field(default=512, metadata={"help": "Maximum tokens of a response", "aliases": ["--response_length"]})
    stop_token: str | None = field(default='eos', metadata={"help": "Truncate responses after this token: `eos` is the tokenizer's, or another one named in `generation_config.json`: eos"})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of sampling and of all log-probabilities"})
    num_iterations: int = field(default=1, metadata={"help": "Passes over the responses of an update", "aliases": ["--num_ppo_epochs", "--ppo_epochs"]})
    kl_coef_end: float | None = field(default=None, metadata={"help": "KL coefficient of the last update; it changes linearly from `beta`"})
    overlong_buffer_len: int | None = field(default=None, metadata={"help": "Last tokens of `max_completion_length` in which a response is penalized, by its length up to `overlong_penalty_factor` (soft overlong penalty, DAPO)"})
    overlong_penalty_factor: float = field(default=1.0, metadata={"help": "Penalty of a response of `max_completion_length` tokens, with `overlong_buffer_len`"})
    epsilon: float = field(default=0.2, metadata={"help": "Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this", "aliases": ["--cliprange"]})
    epsilon_high: float | None = field(default=None, metadata={"help": "Upper clip range: the probability ratio is clipped to at most 1 plus this; for `cispo` to at most this [default: `epsilon`]", "aliases": ["--cliprange_high"]})
    delta: float | None = field(default=None, metadata={"help": "Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3", "aliases": ["--dual_clip"]})
    mask_truncated_completions: bool = field(default=False, metadata={"help": "Mask responses that did not stop within `max_completion_length` in the losses; their rewards still count in their groups"})
    unsupervised_dataset_name: str | None = field(default=None, metadata={"help": "Dataset of texts for a language-modelling loss beside the policy's own: a file, a folder or a hub name"})
    learning_rate: float = field(default=1e-06, metadata={"help": "Peak learning rate"})
    max_grad_norm: float | None = field(default=1.0, metadata={"help": "Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice"})
    print_answers: bool = field(default=False, metadata={"help": "Print and save some of the responses that the run trains on; TRL's log_completions does so every logging_steps updates"})
    shuffle_dataset: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or true: prompts are drawn in a random order"})
    router_aux_loss_coef: float | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts"})
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest"})
    log_completions: bool = field(default=False, metadata={"help": "Of TRL or transformers"})
    use_vllm: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_mode: str = field(default='colocate', metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_model_impl: str = field(default='vllm', metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_enable_sleep_mode: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_base_url: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_host: str = field(default='0.0.0.0', metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_port: int = field(default=8000, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_group_port: int = field(default=51216, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_max_model_length: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_device: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_dtype: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_max_model_len: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_enable_prefix_caching: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    use_transformers_continuous_batching: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    transformers_continuous_batching_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    use_transformers_paged: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    cache_implementation: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: generation is rlhf's own"})
    vllm_structured_outputs_regex: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: responses are not constrained"})
    vllm_guided_decoding_regex: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: responses are not constrained"})
    generation_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: sampling has its own flags: top_k, top_p, min_p, repetition_penalty, min_new_tokens, stop_strings"})
    disable_dropout: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: no model's own dropout is applied"})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    num_generations_eval: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: an evaluation samples one response to each prompt"})
    log_multimodal: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some"})
    log_unique_prompts: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some"})
    wandb_log_unique_prompts: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some"})
    num_completions_to_print: int | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: print_answers shows a few"})


@_with_names
@dataclass
class SFTConfig(_Supervised):
    """Settings of [`SFTTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        chat_template_path (`str`, *optional*):
            File of a chat template to use and to save [default: the tokenizer's].
        eos_token (`str`, *optional*):
            The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat
            template [default: the tokenizer's].
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        dataset_text_field (`str`, *optional*, defaults to `'text'`):
            Column with a text to train on as a whole.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum tokens of a row, which is truncated at its end; none: those of the model.
        packing (`bool`, *optional*, defaults to `False`):
            Pack whole rows into blocks of `max_length` tokens; batch sizes count blocks.
        preset (`str`, *optional*, defaults to `'trl'`):
            Defaults of another system. `trl`: those of this program, with the batch sizes of TRL. `deepspeed-chat`:
            DeepSpeed-Chat's first step, whose flags are accepted too: trl, deepspeed-chat.
        train_batch_size (`int`, *optional*):
            Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
            `train_batch_size`].
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Rows per forward pass in an evaluation.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per optimizer step.
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the dataset; no effect if `max_steps` is set.
        max_steps (`int`, *optional*, defaults to `-1`):
            Number of optimizer steps.
        logging_steps (`int`, *optional*, defaults to `10`):
            Optimizer steps between two logged lines of metrics.
        completion_only_loss (`bool`, *optional*):
            In rows with a prompt and a completion, train on the completion only.
        assistant_only_loss (`bool`, *optional*, defaults to `False`):
            In conversations, train on the assistant's messages only.
        learning_rate (`float`, *optional*, defaults to `2e-05`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the
            next two.
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        padding_free (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_packing (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        router_aux_loss_coef (`float`, *optional*):
            Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        pad_token (`str`, *optional*):
            Of TRL or transformers; it has no effect here: nothing is padded.
        dataset_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: rows are read by their columns.
        truncation_mode (`str`, *optional*, defaults to `'keep_start'`):
            Of TRL or transformers; expected none or keep_start: rows are truncated at their end.
        packing_strategy (`str`, *optional*, defaults to `'bfd'`):
            Of TRL or transformers; expected none or bfd: a block holds whole rows.
        loss_type (`str`, *optional*, defaults to `'nll'`):
            Of TRL or transformers; expected none or nll or chunked_nll: the loss is the negative log-likelihood.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'sft'
    _names = {'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'max_grad_norm': None, 'save_steps': None}

    chat_template_path: str | None = field(default=None, metadata={"help": "File of a chat template to use and to save [default: the tokenizer's]"})
    dataset_text_field: str = field(default='text', metadata={"help": "Column with a text to train on as a whole"})
    max_length: int | None = field(default=1024, metadata={"help": "Maximum tokens of a row, which is truncated at its end; none: those of the model"})
    packing: bool = field(default=False, metadata={"help": "Pack whole rows into blocks of `max_length` tokens; batch sizes count blocks"})
    preset: str = field(default='trl', metadata={"help": "Defaults of another system. `trl`: those of this program, with the batch sizes of TRL. `deepspeed-chat`: DeepSpeed-Chat's first step, whose flags are accepted too: trl, deepspeed-chat"})
    train_batch_size: int | None = field(default=None, metadata={"help": "Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the number of ranks]"})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with `train_batch_size`]"})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Rows per forward pass in an evaluation"})
    completion_only_loss: bool | None = field(default=None, metadata={"help": "In rows with a prompt and a completion, train on the completion only"})
    assistant_only_loss: bool = field(default=False, metadata={"help": "In conversations, train on the assistant's messages only"})
    learning_rate: float = field(default=2e-05, metadata={"help": "Peak learning rate"})
    max_grad_norm: float | None = field(default=1.0, metadata={"help": "Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice"})
    shuffle_dataset: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    padding_free: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    eval_packing: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    router_aux_loss_coef: float | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts"})
    pad_token: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: nothing is padded"})
    dataset_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: rows are read by their columns"})
    truncation_mode: str = field(default='keep_start', metadata={"help": "Of TRL or transformers; expected none or keep_start: rows are truncated at their end"})
    packing_strategy: str = field(default='bfd', metadata={"help": "Of TRL or transformers; expected none or bfd: a block holds whole rows"})
    loss_type: str = field(default='nll', metadata={"help": "Of TRL or transformers; expected none or nll or chunked_nll: the loss is the negative log-likelihood"})


@_with_names
@dataclass
class RewardConfig(_Supervised):
    """Settings of [`RewardTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        new_reward_head (`bool`, *optional*, defaults to `False`):
            Add a randomly initialized score head to a model that has none.
        reward_format (`str`, *optional*):
            Names of the saved tensors: transformers' (`score.weight`) or deepspeed-chat's (`v_head.weight`) [default:
            those of the model's folder]: transformers, deepspeed-chat.
        eos_token (`str`, *optional*):
            The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat
            template [default: the tokenizer's].
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        num_padding_at_beginning (`int`, *optional*):
            With `pair_loss = tokens`, number of padding tokens in a text before the one that ends it [default: those at
            its start].
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum tokens of a row; none: those of the model. Pairs with a longer side are dropped, with a warning of
            their number.
        preset (`str`, *optional*, defaults to `'trl'`):
            Defaults of another system. `trl`: those of this program, with the batch sizes of TRL. `deepspeed-chat`:
            DeepSpeed-Chat's second step, whose flags are accepted too: trl, deepspeed-chat.
        train_batch_size (`int`, *optional*):
            Pairs per optimizer step, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum pairs of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
            `train_batch_size`].
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Pairs per forward pass in an evaluation.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per optimizer step.
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the dataset; no effect if `max_steps` is set.
        max_steps (`int`, *optional*, defaults to `-1`):
            Number of optimizer steps.
        logging_steps (`int`, *optional*, defaults to `10`):
            Optimizer steps between two logged lines of metrics.
        pair_loss (`str`, *optional*, defaults to `'sequence'`):
            Scores of a pair to compare: those of the two texts, or, as in DeepSpeed-Chat, those at every token from the
            first difference on, with or without padding: sequence, tokens, tokens_unpadded.
        center_rewards_coefficient (`float`, *optional*):
            Coefficient of an auxiliary loss that centers the scores of each pair on 0.
        learning_rate (`float`, *optional*, defaults to `0.0001`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the
            next two.
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        pad_token (`str`, *optional*):
            Of TRL or transformers; it has no effect here: nothing is padded; pair_loss = tokens pads with the tokenizer's
            token.
        chat_template_path (`str`, *optional*):
            Of TRL or transformers; expected none: the tokenizer's own template is used.
        disable_dropout (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or true: no model's own dropout is applied.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'reward'
    _names = {'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'max_grad_norm': None, 'save_steps': None}

    new_reward_head: bool = field(default=False, metadata={"help": "Add a randomly initialized score head to a model that has none"})
    reward_format: str | None = field(default=None, metadata={"help": "Names of the saved tensors: transformers' (`score.weight`) or deepspeed-chat's (`v_head.weight`) [default: those of the model's folder]: transformers, deepspeed-chat"})
    num_padding_at_beginning: int | None = field(default=None, metadata={"help": "With `pair_loss = tokens`, number of padding tokens in a text before the one that ends it [default: those at its start]"})
    max_length: int | None = field(default=1024, metadata={"help": "Maximum tokens of a row; none: those of the model. Pairs with a longer side are dropped, with a warning of their number"})
    preset: str = field(default='trl', metadata={"help": "Defaults of another system. `trl`: those of this program, with the batch sizes of TRL. `deepspeed-chat`: DeepSpeed-Chat's second step, whose flags are accepted too: trl, deepspeed-chat"})
    train_batch_size: int | None = field(default=None, metadata={"help": "Pairs per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the number of ranks]"})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Maximum pairs of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with `train_batch_size`]"})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Pairs per forward pass in an evaluation"})
    pair_loss: str = field(default='sequence', metadata={"help": "Scores of a pair to compare: those of the two texts, or, as in DeepSpeed-Chat, those at every token from the first difference on, with or without padding: sequence, tokens, tokens_unpadded"})
    center_rewards_coefficient: float | None = field(default=None, metadata={"help": "Coefficient of an auxiliary loss that centers the scores of each pair on 0"})
    learning_rate: float = field(default=0.0001, metadata={"help": "Peak learning rate"})
    max_grad_norm: float | None = field(default=1.0, metadata={"help": "Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice"})
    shuffle_dataset: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    pad_token: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: nothing is padded; pair_loss = tokens pads with the tokenizer's token"})
    chat_template_path: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the tokenizer's own template is used"})
    disable_dropout: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or true: no model's own dropout is applied"})


@_with_names
@dataclass
class DPOConfig(_Supervised):
    """Settings of [`DPOTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        eos_token (`str`, *optional*):
            The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat
            template [default: the tokenizer's].
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum tokens of a prompt with a completion, which are truncated as `truncation_mode` says; none: those of
            the model.
        truncation_mode (`str`, *optional*, defaults to `'keep_start'`):
            The end of a text that is kept where it is too long. With `keep_start`, pairs are dropped whose prompt alone
            has `max_length` tokens: keep_start, keep_end.
        train_batch_size (`int`, *optional*):
            Pairs per optimizer step, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum pairs of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
            `train_batch_size`].
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Pairs per forward pass in an evaluation.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per optimizer step.
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the dataset; no effect if `max_steps` is set.
        max_steps (`int`, *optional*, defaults to `-1`):
            Number of optimizer steps.
        logging_steps (`int`, *optional*, defaults to `10`):
            Optimizer steps between two logged lines of metrics.
        loss_type (`list[str]`, *optional*, defaults to `['sigmoid']`):
            Loss of a pair; several are added with `loss_weights`: sigmoid, hinge, ipo, exo_pair, nca_pair, robust,
            bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm.
        loss_weights (`list[float]`, *optional*):
            Weights of several losses, a number for each [default: 1].
        beta (`float`, *optional*, defaults to `0.1`):
            Strength of the reference model: a higher one keeps the policy nearer to it.
        label_smoothing (`float`, *optional*, defaults to `0.0`):
            Share of the pairs whose order is taken as wrong, in the losses `exo_pair` (above 0, such as 0.001), `robust`
            (below 0.5, such as 0.1), `aot` and `aot_unpaired`.
        f_divergence_type (`str`, *optional*, defaults to `'reverse_kl'`):
            Divergence from the reference model, in the losses of the difference between both sides of a pair: reverse_kl,
            forward_kl, js_divergence, alpha_divergence.
        f_alpha_divergence_coef (`float`, *optional*, defaults to `0.5`):
            The exponent of `f_divergence_type = alpha_divergence`.
        use_weighting (`bool`, *optional*, defaults to `False`):
            Weigh each pair by the policy's probabilities of its tokens (WPO).
        ld_alpha (`float`, *optional*):
            Weight of the tokens by which a completion is longer than the other one of its pair (LD-DPO), from 0 to 1
            [default: 1].
        discopop_tau (`float`, *optional*, defaults to `0.05`):
            Temperature of the loss `discopop`.
        unsupervised_dataset_name (`str`, *optional*):
            Dataset of texts for a language-modelling loss beside that of the pairs: a file, a folder or a hub name.
        unsupervised_dataset_config_name (`str`, *optional*):
            Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split.
        unsup_coef (`float`, *optional*, defaults to `1.0`):
            Coefficient of the language-modelling loss.
        precompute_ref_log_probs (`bool`, *optional*, defaults to `False`):
            Compute the log-probabilities of the reference model for all pairs before training, which then needs no such
            model in memory.
        precompute_ref_batch_size (`int`, *optional*):
            Pairs per forward pass of `precompute_ref_log_probs` [default: `per_device_train_batch_size`, and
            `per_device_eval_batch_size` for the rows of evaluations].
        sync_ref_model (`bool`, *optional*, defaults to `False`):
            Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps.
        ref_model_mixup_alpha (`float`, *optional*, defaults to `0.6`):
            Share of the policy in the updated reference model; 1 replaces it by the policy.
        ref_model_sync_steps (`int`, *optional*, defaults to `512`):
            Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled
            already are compared with the earlier one.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Apply no dropout, also not that of an adapter (`lora_dropout`), as in TRL. A model's own dropout is applied in
            no case.
        learning_rate (`float`, *optional*, defaults to `1e-06`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the
            next two.
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        padding_free (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        router_aux_loss_coef (`float`, *optional*):
            Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        pad_token (`str`, *optional*):
            Of TRL or transformers; it has no effect here: nothing is padded.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'dpo'
    _names = {'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'save_steps': None}

    max_length: int | None = field(default=1024, metadata={"help": "Maximum tokens of a prompt with a completion, which are truncated as `truncation_mode` says; none: those of the model"})
    truncation_mode: str = field(default='keep_start', metadata={"help": "The end of a text that is kept where it is too long. With `keep_start`, pairs are dropped whose prompt alone has `max_length` tokens: keep_start, keep_end"})
    train_batch_size: int | None = field(default=None, metadata={"help": "Pairs per optimizer step, over all ranks [default: `per_device_train_batch_size` times `gradient_accumulation_steps` times the number of ranks]"})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Maximum pairs of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with `train_batch_size`]"})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Pairs per forward pass in an evaluation"})
    loss_type: list[str] = field(default_factory=lambda: ['sigmoid'], metadata={"help": "Loss of a pair; several are added with `loss_weights`: sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm"})
    loss_weights: list[float] | None = field(default=None, metadata={"help": "Weights of several losses, a number for each [default: 1]"})
    beta: float = field(default=0.1, metadata={"help": "Strength of the reference model: a higher one keeps the policy nearer to it"})
    label_smoothing: float = field(default=0.0, metadata={"help": "Share of the pairs whose order is taken as wrong, in the losses `exo_pair` (above 0, such as 0.001), `robust` (below 0.5, such as 0.1), `aot` and `aot_unpaired`"})
    f_divergence_type: str = field(default='reverse_kl', metadata={"help": "Divergence from the reference model, in the losses of the difference between both sides of a pair: reverse_kl, forward_kl, js_divergence, alpha_divergence"})
    f_alpha_divergence_coef: float = field(default=0.5, metadata={"help": "The exponent of `f_divergence_type = alpha_divergence`"})
    use_weighting: bool = field(default=False, metadata={"help": "Weigh each pair by the policy's probabilities of its tokens (WPO)"})
    ld_alpha: float | None = field(default=None, metadata={"help": "Weight of the tokens by which a completion is longer than the other one of its pair (LD-DPO), from 0 to 1 [default: 1]"})
    discopop_tau: float = field(default=0.05, metadata={"help": "Temperature of the loss `discopop`"})
    unsupervised_dataset_name: str | None = field(default=None, metadata={"help": "Dataset of texts for a language-modelling loss beside that of the pairs: a file, a folder or a hub name"})
    unsupervised_dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split"})
    unsup_coef: float = field(default=1.0, metadata={"help": "Coefficient of the language-modelling loss"})
    precompute_ref_log_probs: bool = field(default=False, metadata={"help": "Compute the log-probabilities of the reference model for all pairs before training, which then needs no such model in memory"})
    precompute_ref_batch_size: int | None = field(default=None, metadata={"help": "Pairs per forward pass of `precompute_ref_log_probs` [default: `per_device_train_batch_size`, and `per_device_eval_batch_size` for the rows of evaluations]"})
    sync_ref_model: bool = field(default=False, metadata={"help": "Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps"})
    ref_model_mixup_alpha: float = field(default=0.6, metadata={"help": "Share of the policy in the updated reference model; 1 replaces it by the policy"})
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled already are compared with the earlier one"})
    disable_dropout: bool = field(default=True, metadata={"help": "Apply no dropout, also not that of an adapter (`lora_dropout`), as in TRL. A model's own dropout is applied in no case"})
    learning_rate: float = field(default=1e-06, metadata={"help": "Peak learning rate"})
    max_grad_norm: float | None = field(default=1.0, metadata={"help": "Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice"})
    shuffle_dataset: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    padding_free: bool = field(default=False, metadata={"help": "Of TRL or transformers; it has no effect here: it changes memory and speed only"})
    router_aux_loss_coef: float | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts"})
    pad_token: str | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: nothing is padded"})


@_with_names
@dataclass
class DistillationConfig(_Distillation):
    """Settings of [`DistillationTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        teacher_model_name_or_path (`str`, *optional*):
            Causal language model to learn from, the teacher, which has the student's tokenizer: a folder or a hub name.
            It is frozen.
        teacher_model_revision (`str`, *optional*, defaults to `'main'`):
            Branch, tag or commit of `teacher_model_name_or_path` on the hub.
        teacher_dtype (`str`, *optional*):
            Dtype of the teacher's weights in memory [default: `dtype`]: auto, float32, bfloat16, float16.
        teacher_load_in_4bit (`bool`, *optional*):
            Hold the teacher's linear layers in 4 bits [default: `load_in_4bit`, which is for the teacher also without
            `use_peft`].
        teacher_load_in_8bit (`bool`, *optional*):
            The same in 8 bits [default: `load_in_8bit`].
        teacher_bnb_4bit_quant_type (`str`, *optional*):
            Data type of the teacher's 4 bits [default: `bnb_4bit_quant_type`]: nf4, fp4.
        teacher_use_bnb_nested_quant (`bool`, *optional*):
            Quantize the scales of the teacher's 4-bit weights too [default: `use_bnb_nested_quant`].
        eos_token (`str`, *optional*):
            The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat
            template [default: the tokenizer's].
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum tokens of a prompt with the response of its row, which are truncated at their start; none: those of
            the models. No effect where all responses are sampled.
        max_prompt_length (`int`, *optional*):
            Maximum tokens of a prompt [default: the models' context minus `response_length`].
        long_prompts (`str`, *optional*, defaults to `'error'`):
            Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side:
            error, drop, truncate_left, truncate_right.
        train_batch_size (`int`, *optional*):
            Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
            `train_batch_size`].
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Rows per forward pass in an evaluation.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per optimizer step.
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the dataset; no effect if `max_steps` is set.
        max_steps (`int`, *optional*, defaults to `-1`):
            Number of optimizer steps.
        logging_steps (`int`, *optional*, defaults to `10`):
            Optimizer steps between two logged lines of metrics.
        log_completions (`bool`, *optional*, defaults to `False`):
            Print and save sampled responses with each logged line of metrics; their score is the teacher's mean
            log-probability of a token.
        num_completions_to_print (`int`, *optional*):
            Number of responses of `log_completions` [default: 5].
        lmbda (`float`, *optional*, defaults to `1.0`):
            Share of the optimizer steps that are on-policy: the student samples the responses. The others have those of
            the rows, or of the teacher with `seq_kd`.
        seq_kd (`bool`, *optional*, defaults to `False`):
            In steps that are not on-policy, the teacher samples the responses.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Maximum tokens of a sampled response.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of sampling, and of both distributions in the loss.
        loss_temperature (`float`, *optional*):
            Temperature of both distributions in the loss, where it is not that of sampling [default: `temperature`].
        top_k (`int`, *optional*, defaults to `0`):
            Sample from this many most likely tokens only; 0 for all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all.
        min_p (`float`, *optional*):
            Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that are in the prompt or the response already; 1 for none.
        min_new_tokens (`int`, *optional*, defaults to `0`):
            Minimum tokens of a response: nothing ends it before.
        stop_strings (`list[str]`, *optional*):
            End a response with the token that completes this text; repeat the flag for several texts.
        logprobs_of (`str`, *optional*, defaults to `'policy'`):
            Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the
            tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Sequences of a rank that are decoded together.
        ds3_gather_for_generation (`bool`, *optional*, defaults to `True`):
            Gather the whole parameters of a sharded model once for the responses of an update; `false` gathers them layer
            by layer for each token, with less memory and more time.
        loss_type (`str`, *optional*, defaults to `'jsd'`):
            Loss of a token: jsd, reverse_kl_advantage.
        beta (`float`, *optional*, defaults to `1.0`):
            Share of the teacher in the mixture of `jsd`: 0 is the KL divergence from teacher to student (forward), 1 that
            from student to teacher (reverse), 0.5 the Jensen-Shannon divergence.
        loss_top_k (`int`, *optional*, defaults to `0`):
            Compare the teacher's likeliest tokens only, this many in each place; 0 compares the whole vocabulary.
        loss_add_tail (`bool`, *optional*, defaults to `True`):
            With `loss_top_k`, all other tokens together are one more outcome; otherwise the probabilities of the
            `loss_top_k` are scaled to sum to 1.
        disable_dropout (`bool`, *optional*, defaults to `False`):
            Apply no dropout of an adapter (`lora_dropout`). A model's own dropout is applied in no case.
        learning_rate (`float`, *optional*, defaults to `1e-06`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the
            next two.
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; expected none or true: rows are drawn in a random order.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        padding_free (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_packing (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        router_aux_loss_coef (`float`, *optional*):
            Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        pad_token (`str`, *optional*):
            Of TRL or transformers; it has no effect here: nothing is padded.
        teacher_model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: teacher_model_revision, teacher_dtype and teacher_load_in_4bit set what
            they have.
        chat_template_path (`str`, *optional*):
            Of TRL or transformers; expected none: the tokenizer's own template is used.
        dataset_text_field (`str`, *optional*):
            Of TRL or transformers; expected none or text: rows have a prompt, which a column of texts has not.
        dataset_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: rows are read by their columns.
        truncation_mode (`str`, *optional*, defaults to `'keep_start'`):
            Of TRL or transformers; it has no effect here: rows that are too long are truncated at their start.
        packing (`str`, *optional*):
            Of TRL or transformers; expected none or false: a row has a prompt of its own.
        assistant_only_loss (`str`, *optional*):
            Of TRL or transformers; expected none or false: a row has a prompt of its own.
        packing_strategy (`str`, *optional*, defaults to `'bfd'`):
            Of TRL or transformers; it has no effect here: nothing is packed.
        completion_only_loss (`str`, *optional*):
            Of TRL or transformers; expected none or true: the response is learned, not the prompt.
        max_tool_calling_iterations (`str`, *optional*):
            Of TRL or transformers; expected none: responses have one turn, without tools.
        log_unique_prompts (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: log_completions shows a few.
        use_vllm (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_mode (`str`, *optional*, defaults to `'colocate'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_model_impl (`str`, *optional*, defaults to `'vllm'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_sleep_mode (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_base_url (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_host (`str`, *optional*, defaults to `'0.0.0.0'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_port (`int`, *optional*, defaults to `8000`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_group_port (`int`, *optional*, defaults to `51216`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.3`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_length (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_device (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_dtype (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_len (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_prefix_caching (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_continuous_batching (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        transformers_continuous_batching_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_paged (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        cache_implementation (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_structured_outputs_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        vllm_guided_decoding_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        generation_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: sampling has its own flags: top_k, top_p, min_p, repetition_penalty,
            min_new_tokens, stop_strings.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'distill'
    _names = {'max_new_tokens': 'max_completion_length', 'response_length': 'max_completion_length', 'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'save_steps': None}

    lmbda: float = field(default=1.0, metadata={"help": "Share of the optimizer steps that are on-policy: the student samples the responses. The others have those of the rows, or of the teacher with `seq_kd`"})
    max_completion_length: int = field(default=512, metadata={"help": "Maximum tokens of a sampled response", "aliases": ["--max_new_tokens", "--response_length"]})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of sampling, and of both distributions in the loss"})
    loss_temperature: float | None = field(default=None, metadata={"help": "Temperature of both distributions in the loss, where it is not that of sampling [default: `temperature`]"})
    beta: float = field(default=1.0, metadata={"help": "Share of the teacher in the mixture of `jsd`: 0 is the KL divergence from teacher to student (forward), 1 that from student to teacher (reverse), 0.5 the Jensen-Shannon divergence"})
    disable_dropout: bool = field(default=False, metadata={"help": "Apply no dropout of an adapter (`lora_dropout`). A model's own dropout is applied in no case"})
    learning_rate: float = field(default=1e-06, metadata={"help": "Peak learning rate"})


@_with_names
@dataclass
class GKDConfig(_Distillation):
    """Settings of [`GKDTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        teacher_model_name_or_path (`str`, *optional*):
            Causal language model to learn from, the teacher, which has the student's tokenizer: a folder or a hub name.
            It is frozen.
        teacher_model_revision (`str`, *optional*, defaults to `'main'`):
            Branch, tag or commit of `teacher_model_name_or_path` on the hub.
        teacher_dtype (`str`, *optional*):
            Dtype of the teacher's weights in memory [default: `dtype`]: auto, float32, bfloat16, float16.
        teacher_load_in_4bit (`bool`, *optional*):
            Hold the teacher's linear layers in 4 bits [default: `load_in_4bit`, which is for the teacher also without
            `use_peft`].
        teacher_load_in_8bit (`bool`, *optional*):
            The same in 8 bits [default: `load_in_8bit`].
        teacher_bnb_4bit_quant_type (`str`, *optional*):
            Data type of the teacher's 4 bits [default: `bnb_4bit_quant_type`]: nf4, fp4.
        teacher_use_bnb_nested_quant (`bool`, *optional*):
            Quantize the scales of the teacher's 4-bit weights too [default: `use_bnb_nested_quant`].
        eos_token (`str`, *optional*):
            The token that ends a text, in the model and the tokenizer that are saved too, such as <|im_end|> of a chat
            template [default: the tokenizer's].
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum tokens of a prompt with the response of its row, which are truncated at their start; none: those of
            the models. No effect where all responses are sampled.
        max_prompt_length (`int`, *optional*):
            Maximum tokens of a prompt [default: the models' context minus `response_length`].
        long_prompts (`str`, *optional*, defaults to `'error'`):
            Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side:
            error, drop, truncate_left, truncate_right.
        train_batch_size (`int`, *optional*):
            Rows per optimizer step, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum rows of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit with
            `train_batch_size`].
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Rows per forward pass in an evaluation.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per optimizer step.
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the dataset; no effect if `max_steps` is set.
        max_steps (`int`, *optional*, defaults to `-1`):
            Number of optimizer steps.
        logging_steps (`int`, *optional*, defaults to `10`):
            Optimizer steps between two logged lines of metrics.
        log_completions (`bool`, *optional*, defaults to `False`):
            Print and save sampled responses with each logged line of metrics; their score is the teacher's mean
            log-probability of a token.
        num_completions_to_print (`int`, *optional*):
            Number of responses of `log_completions` [default: 5].
        lmbda (`float`, *optional*, defaults to `0.5`):
            Share of the optimizer steps that are on-policy: the student samples the responses. The others have those of
            the rows, or of the teacher with `seq_kd`.
        seq_kd (`bool`, *optional*, defaults to `False`):
            In steps that are not on-policy, the teacher samples the responses.
        max_new_tokens (`int`, *optional*, defaults to `128`):
            Maximum tokens of a sampled response.
        temperature (`float`, *optional*, defaults to `0.9`):
            Temperature of sampling, and of both distributions in the loss.
        loss_temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of both distributions in the loss, where it is not that of sampling [default: `temperature`].
        top_k (`int`, *optional*, defaults to `0`):
            Sample from this many most likely tokens only; 0 for all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all.
        min_p (`float`, *optional*):
            Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that are in the prompt or the response already; 1 for none.
        min_new_tokens (`int`, *optional*, defaults to `0`):
            Minimum tokens of a response: nothing ends it before.
        stop_strings (`list[str]`, *optional*):
            End a response with the token that completes this text; repeat the flag for several texts.
        logprobs_of (`str`, *optional*, defaults to `'policy'`):
            Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the
            tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Sequences of a rank that are decoded together.
        ds3_gather_for_generation (`bool`, *optional*, defaults to `True`):
            Gather the whole parameters of a sharded model once for the responses of an update; `false` gathers them layer
            by layer for each token, with less memory and more time.
        loss_type (`str`, *optional*, defaults to `'jsd'`):
            Loss of a token: jsd, reverse_kl_advantage.
        beta (`float`, *optional*, defaults to `0.5`):
            Share of the teacher in the mixture of `jsd`: 0 is the KL divergence from teacher to student (forward), 1 that
            from student to teacher (reverse), 0.5 the Jensen-Shannon divergence.
        loss_top_k (`int`, *optional*, defaults to `0`):
            Compare the teacher's likeliest tokens only, this many in each place; 0 compares the whole vocabulary.
        loss_add_tail (`bool`, *optional*, defaults to `True`):
            With `loss_top_k`, all other tokens together are one more outcome; otherwise the probabilities of the
            `loss_top_k` are scaled to sum to 1.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Apply no dropout of an adapter (`lora_dropout`). A model's own dropout is applied in no case.
        learning_rate (`float`, *optional*, defaults to `2e-05`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the
            next two.
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; expected none or true: rows are drawn in a random order.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        padding_free (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_packing (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        router_aux_loss_coef (`float`, *optional*):
            Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        pad_token (`str`, *optional*):
            Of TRL or transformers; it has no effect here: nothing is padded.
        teacher_model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: teacher_model_revision, teacher_dtype and teacher_load_in_4bit set what
            they have.
        chat_template_path (`str`, *optional*):
            Of TRL or transformers; expected none: the tokenizer's own template is used.
        dataset_text_field (`str`, *optional*):
            Of TRL or transformers; expected none or text: rows have a prompt, which a column of texts has not.
        dataset_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: rows are read by their columns.
        truncation_mode (`str`, *optional*, defaults to `'keep_start'`):
            Of TRL or transformers; it has no effect here: rows that are too long are truncated at their start.
        packing (`str`, *optional*):
            Of TRL or transformers; expected none or false: a row has a prompt of its own.
        assistant_only_loss (`str`, *optional*):
            Of TRL or transformers; expected none or false: a row has a prompt of its own.
        packing_strategy (`str`, *optional*, defaults to `'bfd'`):
            Of TRL or transformers; it has no effect here: nothing is packed.
        completion_only_loss (`str`, *optional*):
            Of TRL or transformers; expected none or true: the response is learned, not the prompt.
        max_tool_calling_iterations (`str`, *optional*):
            Of TRL or transformers; expected none: responses have one turn, without tools.
        log_unique_prompts (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: log_completions shows a few.
        use_vllm (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_mode (`str`, *optional*, defaults to `'colocate'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_model_impl (`str`, *optional*, defaults to `'vllm'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_sleep_mode (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_base_url (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_host (`str`, *optional*, defaults to `'0.0.0.0'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_port (`int`, *optional*, defaults to `8000`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_group_port (`int`, *optional*, defaults to `51216`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.3`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_length (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_device (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_dtype (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_len (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_prefix_caching (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_continuous_batching (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        transformers_continuous_batching_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_paged (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        cache_implementation (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_structured_outputs_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        vllm_guided_decoding_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        generation_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: sampling has its own flags: top_k, top_p, min_p, repetition_penalty,
            min_new_tokens, stop_strings.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'distill'
    _names = {'max_completion_length': 'max_new_tokens', 'response_length': 'max_new_tokens', 'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'lmbda': 1, 'max_new_tokens': 512, 'temperature': 1, 'loss_temperature': None, 'beta': 1, 'disable_dropout': False, 'learning_rate': 1e-06, 'save_steps': None}

    lmbda: float = field(default=0.5, metadata={"help": "Share of the optimizer steps that are on-policy: the student samples the responses. The others have those of the rows, or of the teacher with `seq_kd`"})
    max_new_tokens: int = field(default=128, metadata={"help": "Maximum tokens of a sampled response", "aliases": ["--max_completion_length", "--response_length"]})
    temperature: float = field(default=0.9, metadata={"help": "Temperature of sampling, and of both distributions in the loss"})
    loss_temperature: float | None = field(default=1.0, metadata={"help": "Temperature of both distributions in the loss, where it is not that of sampling [default: `temperature`]"})
    beta: float = field(default=0.5, metadata={"help": "Share of the teacher in the mixture of `jsd`: 0 is the KL divergence from teacher to student (forward), 1 that from student to teacher (reverse), 0.5 the Jensen-Shannon divergence"})
    disable_dropout: bool = field(default=True, metadata={"help": "Apply no dropout of an adapter (`lora_dropout`). A model's own dropout is applied in no case"})
    learning_rate: float = field(default=2e-05, metadata={"help": "Peak learning rate"})


@_with_names
@dataclass
class PPOConfig(_Rollouts):
    """Settings of [`PPOTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        sft_model_path (`str`, *optional*, defaults to `'EleutherAI/pythia-160m'`):
            Causal language model to train, the policy: a folder or a hub name. A frozen copy of it is the reference
            model.
        reward_model_path (`str`, *optional*, defaults to `'EleutherAI/pythia-160m'`):
            Reward model, a sequence classifier: a folder or a hub name. If its tokenizer is not the policy's, it reads
            decoded text.
        reward_label (`str`, *optional*):
            Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
        new_reward_head (`bool`, *optional*, defaults to `False`):
            Add a randomly initialized score head to a reward or value model that has none.
        reward_weights (`list[float]`, *optional*):
            Weights of the rewards in their sum: NAME=X, separated by commas; X for all; or one X for each reward, in the
            order model, command, url, `reward` [default: 1].
        reward_normalize (`list[str]`, *optional*):
            Normalize a reward's scores: NAME=std divides by their running standard deviation, NAME=mean_std subtracts
            their running mean first.
        reward_scale (`list[str]`, *optional*):
            Factor of a reward's scores, as NAME=X; applied after `reward_normalize`.
        reward_clip (`list[str]`, *optional*):
            Clip a reward's scores to [-X, X], as NAME=X; applied after `reward_scale` and before `reward_weights`.
        reward_pair (`bool`, *optional*, defaults to `False`):
            Give prompt and response to reward models that are encoders as two segments, `[CLS] prompt [SEP] response
            [SEP]`, as OpenAssistant's DeBERTa reads them; without it as one text.
        reward_label_column (`str`, *optional*, defaults to `'label'`):
            Column of the dataset to send to a reward service as `labels`.
        reward_batch_size (`int`, *optional*, defaults to `32`):
            Responses per request to a reward service.
        reward_concurrency (`int`, *optional*, defaults to `4`):
            Concurrent requests to a reward service.
        reward_timeout (`float`, *optional*, defaults to `120.0`):
            Timeout in seconds for the next score of a reward program, or for a request to a service.
        reward_retries (`int`, *optional*, defaults to `3`):
            Retries after a reward program or service fails, before the run ends with an error.
        max_tool_calling_iterations (`int`, *optional*):
            Maximum number of turns with tool calls per response [default: no limit but its length].
        malformed_calls (`str`, *optional*, defaults to `'text'`):
            Treatment of a turn with a broken tool call: plain text, as in TRL, or a failed call whose error the policy
            sees: text, error.
        environment_failure_reward (`float`, *optional*):
            Reward of a row whose environment dies [default: the run ends with an error].
        max_environments (`int`, *optional*, defaults to `64`):
            Maximum number of sessions of environments that are open at a time; further rows wait.
        tool_timeout (`float`, *optional*, defaults to `30.0`):
            Time limit of a tool call in seconds.
        reset_timeout (`float`, *optional*, defaults to `60.0`):
            Time limit in seconds for the beginning and the end of a session, and for the start of its program.
        tool_output_limit (`str`, *optional*, defaults to `'64KB'`):
            Maximum size of the result of a tool call; a longer one is cut, with a mark that the policy sees.
        tool_memory (`str`, *optional*):
            Maximum address space of each process of tools and environments.
        tool_processes (`int`, *optional*):
            Number of processes and threads of the user above which tools and environments start no more.
        tool_env (`list[str]`, *optional*):
            Environment variables that tools and environments see although their names are those of secrets, such as
            HF_TOKEN.
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        max_prompt_length (`int`, *optional*):
            Maximum tokens of a prompt [default: the models' context minus `response_length`].
        long_prompts (`str`, *optional*, defaults to `'error'`):
            Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side:
            error, drop, truncate_left, truncate_right.
        apply_chat_template (`bool`, *optional*, defaults to `False`):
            Put a prompt that is a string into the chat template, as a user message.
        system_prompt (`str`, *optional*):
            System message of every conversation that has none.
        preset (`str`, *optional*, defaults to `'trl'`):
            Defaults and batch sizes of another trainer. `trl`: TRL's PPOTrainer today. `trl-ppov2`: TRL 0.9 to 0.11,
            where `num_mini_batches` multiplies the size of an update. `trl-legacy`: TRL's older trainer with `step()` and
            a value head on the policy. `deepspeed-chat`: DeepSpeed-Chat's third step. `grpo` and `rloo`: TRL's
            GRPOTrainer and RLOOTrainer, without a value model: trl, trl-ppov2, trl-legacy, deepspeed-chat, grpo, rloo.
        per_device_generation_batch_size (`int`, *optional*):
            Prompts of a rank per generation batch. An update samples this times `generation_batches` responses and trains
            on mini-batches of `per_device_train_batch_size` times `gradient_accumulation_steps` [default: an update is
            `num_mini_batches` mini-batches].
        generation_batches (`int`, *optional*, defaults to `1`):
            Generation batches per update, with `per_device_generation_batch_size`.
        generation_batch_size (`int`, *optional*):
            Responses per update over all ranks, with the presets `grpo` and `rloo` [default: those of an optimizer step].
        steps_per_generation (`int`, *optional*):
            Micro-batches of `per_device_train_batch_size` per update, with the presets `grpo` and `rloo` [default:
            `gradient_accumulation_steps`].
        max_steps (`int`, *optional*, defaults to `-1`):
            Optimizer steps, rounded up to whole updates, with the presets `grpo` and `rloo` [default: `num_train_epochs`
            over the prompts].
        train_batch_size (`int`, *optional*):
            Responses per update, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum sequences of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit
            with `train_batch_size`].
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per update: an update samples this times `per_device_train_batch_size` responses
            per rank.
        num_mini_batches (`int`, *optional*, defaults to `1`):
            Mini-batches per PPO epoch, one optimizer step each; must divide the number of responses of an update.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Sequences of a rank per forward pass without gradients.
        total_episodes (`int`, *optional*):
            Number of responses to train on, rounded up to whole updates [default: `num_train_epochs` times the prompts].
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the prompts; no effect if `total_episodes` is set.
        num_sample_generations (`int`, *optional*, defaults to `10`):
            Approximate number of sample tables to show during the run; one more at its end. 0 for none.
        response_length (`int`, *optional*, defaults to `53`):
            Maximum tokens of a response.
        stop_token (`str`, *optional*):
            Truncate responses after this token: `eos` is the tokenizer's, or another one named in
            `generation_config.json`: eos.
        stop_token_id (`int`, *optional*):
            Truncate responses after the token with this id.
        temperature (`float`, *optional*, defaults to `0.7`):
            Temperature of sampling and of all log-probabilities.
        top_k (`int`, *optional*, defaults to `0`):
            Sample from this many most likely tokens only; 0 for all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all.
        min_p (`float`, *optional*):
            Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that are in the prompt or the response already; 1 for none.
        min_new_tokens (`int`, *optional*, defaults to `0`):
            Minimum tokens of a response: nothing ends it before.
        stop_strings (`list[str]`, *optional*):
            End a response with the token that completes this text; repeat the flag for several texts.
        logprobs_of (`str`, *optional*, defaults to `'policy'`):
            Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the
            tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered.
        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            PPO epochs: passes over the responses of an update.
        missing_eos_penalty (`float`, *optional*):
            Penalty subtracted from the score of a response without a stop token.
        non_eos_penalty (`bool`, *optional*, defaults to `False`):
            Replace the score of a response without a stop token by `penalty_reward_value`.
        penalty_reward_value (`float`, *optional*, defaults to `-1.0`):
            Score of a response without a stop token, with `non_eos_penalty`.
        score_position (`str`, *optional*, defaults to `'after_stop'`):
            Position of the score: the one after the stop token, or the response's last token: after_stop, last_token.
        kl_coef (`float`, *optional*, defaults to `0.05`):
            Coefficient of the KL penalty per token.
        kl_estimator (`str`, *optional*, defaults to `'k1'`):
            Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary: k1, k3, abs, mse,
            full.
        kl_in_loss (`bool`, *optional*, defaults to `False`):
            Add the KL penalty to the policy's loss instead of the rewards.
        use_bias_correction_kl (`bool`, *optional*, defaults to `False`):
            Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that
            sampled.
        adap_kl_ctrl (`bool`, *optional*, defaults to `False`):
            Adapt the KL coefficient after each update, so that the KL per response approaches `target`.
        target (`float`, *optional*, defaults to `6.0`):
            Target KL per response of `adap_kl_ctrl`, in nats.
        horizon (`float`, *optional*, defaults to `10000.0`):
            Horizon of `adap_kl_ctrl` in responses; a smaller one adapts faster.
        kl_coef_end (`float`, *optional*):
            KL coefficient of the last update; it changes linearly from `kl_coef`.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Scale the rewards of an update to variance 1.
        whiten_advantages (`str`, *optional*, defaults to `'batch'`):
            Whiten the advantages to mean 0 and variance 1, over the tokens of the whole update or of each mini-batch.
            With the estimators `gae`, `reinforce` and `reinforce_baseline`; the others have `scale_rewards` and
            `normalize_advantages`: batch, mini_batch, none.
        advantage_estimator (`str`, *optional*, defaults to `'gae'`):
            Estimator of the advantages. `gae` needs a value model; the others compare responses or use returns, and no
            value model is loaded. `rloo`, `grpo`, `dr_grpo` and `reinforce_baseline` compare the `num_generations`
            responses to a prompt, `remax` compares with a greedy response, `reinforce` is REINFORCE++: gae, rloo, grpo,
            dr_grpo, reinforce, reinforce_baseline, remax.
        num_generations (`int`, *optional*, defaults to `1`):
            Responses to each prompt, which make a group. Batch sizes count responses.
        scale_rewards (`str`, *optional*, defaults to `'group'`):
            Standard deviation by which the advantages of `grpo` are divided: that of each group, that of the whole
            update, or none: group, batch, none.
        normalize_advantages (`bool`, *optional*, defaults to `False`):
            Normalize the advantages of `rloo` to mean 0 and standard deviation 1 over the responses of an update.
        multi_objective_aggregation (`str`, *optional*, defaults to `'sum_then_normalize'`):
            Combination of several rewards: `sum_then_normalize` compares their weighted sums; `normalize_then_sum`
            compares each reward by itself within its group first, and normalizes the weighted sums over the update
            (GDPO): sum_then_normalize, normalize_then_sum.
        lam_policy (`float`, *optional*):
            Lambda of the policy's advantages, where the returns of the value model keep `lam` (decoupled GAE) [default:
            `lam`].
        lam_policy_alpha (`float`, *optional*):
            Lambda of the policy's advantages that follows the length of a response: 1 - 1 / (this * length) (VAPO uses
            0.05).
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Replace groups whose scores are all equal, from which nothing is learned, by groups of the next prompts
            (dynamic sampling, DAPO).
        dynamic_filtering_reward_range (`list[float]`, *optional*):
            Replace groups whose mean score is not between these two numbers, LOW,HIGH (OpenRLHF's dynamic filtering).
        max_num_gen_batches (`int`, *optional*, defaults to `10`):
            Maximum batches of responses that an update samples for `dynamic_sampling` or
            `dynamic_filtering_reward_range`; groups that are still missing then are taken from those that were replaced.
        overlong_buffer_len (`int`, *optional*):
            Last tokens of `response_length` in which a response is penalized, by its length up to
            `overlong_penalty_factor` (soft overlong penalty, DAPO).
        overlong_penalty_factor (`float`, *optional*, defaults to `1.0`):
            Penalty of a response of `response_length` tokens, with `overlong_buffer_len`.
        sync_ref_model (`bool`, *optional*, defaults to `False`):
            Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps.
        ref_model_mixup_alpha (`float`, *optional*, defaults to `0.6`):
            Share of the policy in the updated reference model; 1 replaces it by the policy.
        ref_model_sync_steps (`int`, *optional*, defaults to `512`):
            Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled
            already are compared with the earlier one.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor of the rewards.
        lam (`float`, *optional*, defaults to `0.95`):
            Lambda of generalized advantage estimation (GAE).
        cliprange (`float`, *optional*, defaults to `0.2`):
            Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Clip range of the value loss: the new value is clipped to the old one plus or minus this.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Coefficient of the value loss.
        loss_type (`str`, *optional*, defaults to `'bnpo'`):
            The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its
            tokens; `grpo` the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum
            over all tokens, divided by the responses times `response_length`; `dapo` by the tokens of the whole update.
            `cispo`, `sapo` and `vespo` have objectives of their own: bnpo, grpo, dr_grpo, dapo, cispo, sapo, luspo,
            vespo.
        importance_sampling_level (`str`, *optional*, defaults to `'token'`):
            Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO);
            or their product, the ratio of the whole response: token, sequence, sequence_product.
        cliprange_high (`float`, *optional*):
            Upper clip range: the probability ratio is clipped to at most 1 plus this; for `cispo` to at most this
            [default: `cliprange`].
        dual_clip (`float`, *optional*):
            Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Entropy bonus coefficient: this times the entropy is subtracted from the policy's loss.
        use_adaptive_entropy (`bool`, *optional*, defaults to `False`):
            Change the entropy bonus coefficient after each optimizer step: it rises by `entropy_coef_delta` while the
            entropy is at most `entropy_target`, and falls above it, where there is no bonus. `entropy_coef` is its
            initial value.
        entropy_coef_min (`float`, *optional*, defaults to `0.0`):
            Minimum coefficient of `use_adaptive_entropy`.
        entropy_coef_max (`float`, *optional*, defaults to `1.0`):
            Maximum coefficient of `use_adaptive_entropy`.
        entropy_coef_delta (`float`, *optional*, defaults to `0.005`):
            Change of the coefficient of `use_adaptive_entropy` in an optimizer step.
        entropy_target (`float`, *optional*, defaults to `0.2`):
            Target of `use_adaptive_entropy`: mean entropy per token, in nats; near that of the first updates.
        target_kl (`float`, *optional*):
            Stop an update's epochs after one whose last mini-batch has a KL per token to the sampling policy above 1.5
            times this.
        ratio_threshold (`float`, *optional*):
            Skip the optimizer step of a mini-batch whose mean probability ratio is above this.
        top_entropy_quantile (`float`, *optional*, defaults to `1.0`):
            Share of the tokens, those of the highest entropy, that the policy's objective trains; takes one further
            forward pass if below 1.
        off_policy_mask_threshold (`float`, *optional*):
            Leave out responses with a negative advantage whose mean KL per token from the sampling policy is above this;
            takes one further forward pass.
        sapo_temperature_pos (`float`, *optional*, defaults to `1.0`):
            Temperature of the loss `sapo` where the advantage is positive.
        sapo_temperature_neg (`float`, *optional*, defaults to `1.05`):
            Temperature of the loss `sapo` where the advantage is negative.
        vespo_k_pos (`float`, *optional*, defaults to `2.0`):
            Power of the ratio in the loss `vespo` where the advantage is positive.
        vespo_lambda_pos (`float`, *optional*, defaults to `3.0`):
            Decay of the ratio in the loss `vespo` where the advantage is positive.
        vespo_k_neg (`float`, *optional*, defaults to `3.0`):
            Power of the ratio in the loss `vespo` where the advantage is negative.
        vespo_lambda_neg (`float`, *optional*, defaults to `2.0`):
            Decay of the ratio in the loss `vespo` where the advantage is negative.
        clip_reward_value (`float`, *optional*):
            Clip a response's whole score, scores of its tokens included, to plus or minus this when it becomes a reward.
        reward_clip_range (`list[float]`, *optional*):
            Clip a response's whole score to between these two numbers, LOW,HIGH.
        min_response_length (`int`, *optional*, defaults to `0`):
            Exclude responses with fewer counted tokens from training. If none is left, the last ones that were trained on
            are used again.
        mask_truncated_completions (`bool`, *optional*, defaults to `False`):
            Mask responses that did not stop within `response_length` in the losses; their rewards still count in their
            groups.
        eos_in_loss (`str`, *optional*, defaults to `'always'`):
            Whether a response's end-of-sequence token is in the losses. Excluded, it still gets the score. `unless_pad`
            excludes it where DeepSpeed-Chat pads with it: for all models but Llama, and for a Llama whose padding token
            it is: always, unless_pad, never.
        last_value_in_loss (`bool`, *optional*, defaults to `True`):
            Train the value after a response's last token too. Only with a `score_position` after that token.
        unsupervised_dataset_name (`str`, *optional*):
            Dataset of texts for a language-modelling loss beside that of the command (PPO-ptx): a file, a folder or a hub
            name.
        unsupervised_dataset_config_name (`str`, *optional*):
            Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split.
        unsup_coef (`float`, *optional*, defaults to `27.8`):
            Coefficient of the language-modelling loss.
        enable_ema (`bool`, *optional*, defaults to `False`):
            Maintain a moving average of the policy's weights, and save it in the folder `ema`.
        ema_beta (`float`, *optional*, defaults to `0.992`):
            Decay of the moving average per optimizer step.
        value_head (`bool`, *optional*, defaults to `False`):
            Use a value head on the policy's own trunk instead of a value model: one pass and one optimizer for both.
        raw_logprobs (`bool`, *optional*, defaults to `False`):
            Compute log-probabilities of the policy's own distribution, without `temperature`.
        num_shared_layers (`int`, *optional*):
            Number of lower layers that are frozen and shared with the reference model, so that memory holds them once.
        batch_size (`int`, *optional*):
            Responses per update, with the preset `trl-legacy` [default: 128].
        mini_batch_size (`int`, *optional*):
            Responses per mini-batch, with the preset `trl-legacy`; `gradient_accumulation_steps` mini-batches make an
            optimizer step [default: `batch_size` divided by `gradient_accumulation_steps`].
        early_stopping (`bool`, *optional*, defaults to `False`):
            Stop an update's epochs at `target_kl`, which is 1 then unless it is set.
        use_score_scaling (`bool`, *optional*, defaults to `False`):
            Divide scores by the running standard deviation of all scores of the run.
        use_score_norm (`bool`, *optional*, defaults to `False`):
            With `use_score_scaling`, subtract the running mean of all scores of the run first.
        score_clip (`float`, *optional*):
            Clip scores to plus or minus this value, after `use_score_scaling`.
        value_use_peft (`bool`, *optional*):
            Train LoRA adapters of the value model [default: `use_peft`].
        value_lora_r (`int`, *optional*):
            Rank of the value model's adapters [default: `lora_r`].
        value_lora_target_modules (`list[str]`, *optional*):
            Linear layers of the value model that get an adapter [default: `lora_target_modules`].
        value_lora_modules_to_save (`list[str]`, *optional*):
            Modules of the value model that are trained in full [default: `lora_modules_to_save` without the LM head].
        learning_rate (`float`, *optional*, defaults to `3e-06`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        value_warmup_updates (`int`, *optional*, defaults to `0`):
            Number of updates at the start that train only the value model.
        value_learning_rate (`float`, *optional*):
            Peak learning rate of the value model [default: `learning_rate`].
        value_lr_scheduler_type (`str`, *optional*):
            Learning-rate schedule of the value model [default: `lr_scheduler_type`]: linear, cosine, cosine_with_min_lr,
            cosine_with_restarts, polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        value_lr_warmup_steps (`int`, *optional*):
            Warm-up updates of the value model's learning rate [default: those of `warmup_steps` or `warmup_ratio`].
        value_weight_decay (`float`, *optional*):
            Weight decay of the value model [default: `weight_decay`].
        value_max_grad_norm (`float`, *optional*):
            Maximum norm of the value model's gradients; 0 turns clipping off [default: `max_grad_norm`].
        max_skipped_updates (`int`, *optional*, defaults to `3`):
            Stop after this many consecutive updates in which every optimizer step was skipped because a loss or a
            gradient was not finite.
        no_checks (`bool`, *optional*, defaults to `False`):
            Skip the checks at the start of the run: first probability ratio, first KL, and decoding.
        on_alarm (`list[str]`, *optional*):
            Action when an alarm is raised, as NAME=ACTION; repeat the flag for several. NAME is an alarm, such as
            runaway_kl, or all, for every alarm that is not named. ACTION: warn; stop, which saves a checkpoint and ends
            the run; rollback, which continues from the last checkpoint before the metric began to move, with half the
            learning rate and other samples [default: all=warn].
        max_rollbacks (`int`, *optional*, defaults to `3`):
            Rollbacks of a run, at most; the next alarm with that action stops it.
        align_overflow (`bool`, *optional*, defaults to `False`):
            With `fp16`, skip the optimizer step of both policy and value model if the gradients of either overflow.
        compute_fp32_loss (`bool`, *optional*, defaults to `True`):
            Compute log-probabilities from float32 logits, for policy and reference model. Always on: `false` is refused.
        print_answers (`bool`, *optional*, defaults to `False`):
            Print and save some of the responses that the run trains on.
        print_answers_interval (`int`, *optional*, defaults to `1`):
            Updates between two prints of `print_answers`.
        log_rollouts (`bool`, *optional*, defaults to `False`):
            Write all responses of every update to `output_dir/rollouts`, one Parquet file per update: tokens, scores,
            log-probabilities, values and advantages.
        rollouts_limit (`int`, *optional*):
            Number of newest updates whose rollouts are kept, with `log_rollouts` [default: all].
        enable_test_mode (`bool`, *optional*, defaults to `False`):
            Stop after the update `test_stop_step`; learning rates are those of the whole run.
        test_stop_step (`int`, *optional*, defaults to `0`):
            Last update of `enable_test_mode`, counted from 0.
        num_eval_prompts (`int`, *optional*, defaults to `128`):
            Maximum prompts in an evaluation: the first of the split.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        actor_zero_stage (`str`, *optional*):
            `zero_stage` of the policy and of the reference model [default: `zero_stage`]: 0, 1, 2, 3.
        critic_zero_stage (`str`, *optional*):
            `zero_stage` of the value model [default: `zero_stage`]: 0, 1, 2, 3.
        ds3_gather_for_generation (`bool`, *optional*, defaults to `True`):
            Gather the policy's whole parameters once for the generation of an update where they are sharded; `false`
            gathers them layer by layer for each token, with less memory and more time.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        offload_optimizer (`bool`, *optional*, defaults to `False`):
            `offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the
            next two.
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        logging_steps (`float`, *optional*, defaults to `10`):
            Of TRL or transformers; it has no effect here: each update is logged.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Of TRL or transformers; it has no effect here: an evaluation takes local_rollout_forward_batch_size prompts at
            a time.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        world_size (`int`, *optional*):
            Of TRL or transformers; expected none or 1: the number of ranks is the launcher's.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        dataset_prompt_column (`str`, *optional*):
            Of TRL or transformers.
        model_adapter_name (`str`, *optional*):
            Of TRL or transformers; expected none: the reference is the policy without its adapters.
        ref_adapter_name (`str`, *optional*):
            Of TRL or transformers; expected none: the reference is the policy without its adapters.
        num_total_batches (`str`, *optional*):
            Of TRL or transformers; expected none: it is computed from the other sizes.
        micro_batch_size (`str`, *optional*):
            Of TRL or transformers; expected none: it is computed from the other sizes.
        local_batch_size (`str`, *optional*):
            Of TRL or transformers; expected none: it is computed from the other sizes.
        local_mini_batch_size (`str`, *optional*):
            Of TRL or transformers; expected none: it is computed from the other sizes.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL: `revision`, `dtype` and a quantization.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'ppo'
    _names = {'max_completion_length': 'response_length', 'num_iterations': 'num_ppo_epochs', 'ppo_epochs': 'num_ppo_epochs', 'beta': 'kl_coef', 'init_kl_coef': 'kl_coef', 'kl_penalty': 'kl_estimator', 'n_samples_per_prompt': 'num_generations', 'filter_groups': 'dynamic_sampling', 'epsilon': 'cliprange', 'epsilon_high': 'cliprange_high', 'delta': 'dual_clip', 'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'save_steps': None}

    sft_model_path: str = field(default='EleutherAI/pythia-160m', metadata={"help": "Causal language model to train, the policy: a folder or a hub name. A frozen copy of it is the reference model"})
    reward_model_path: str | None = field(default='EleutherAI/pythia-160m', metadata={"help": "Reward model, a sequence classifier: a folder or a hub name. If its tokenizer is not the policy's, it reads decoded text"})
    new_reward_head: bool = field(default=False, metadata={"help": "Add a randomly initialized score head to a reward or value model that has none"})
    reward_weights: list[float] | None = field(default=None, metadata={"help": "Weights of the rewards in their sum: NAME=X, separated by commas; X for all; or one X for each reward, in the order model, command, url, `reward` [default: 1]"})
    max_prompt_length: int | None = field(default=None, metadata={"help": "Maximum tokens of a prompt [default: the models' context minus `response_length`]"})
    preset: str = field(default='trl', metadata={"help": "Defaults and batch sizes of another trainer. `trl`: TRL's PPOTrainer today. `trl-ppov2`: TRL 0.9 to 0.11, where `num_mini_batches` multiplies the size of an update. `trl-legacy`: TRL's older trainer with `step()` and a value head on the policy. `deepspeed-chat`: DeepSpeed-Chat's third step. `grpo` and `rloo`: TRL's GRPOTrainer and RLOOTrainer, without a value model: trl, trl-ppov2, trl-legacy, deepspeed-chat, grpo, rloo"})
    per_device_generation_batch_size: int | None = field(default=None, metadata={"help": "Prompts of a rank per generation batch. An update samples this times `generation_batches` responses and trains on mini-batches of `per_device_train_batch_size` times `gradient_accumulation_steps` [default: an update is `num_mini_batches` mini-batches]"})
    generation_batches: int = field(default=1, metadata={"help": "Generation batches per update, with `per_device_generation_batch_size`"})
    generation_batch_size: int | None = field(default=None, metadata={"help": "Responses per update over all ranks, with the presets `grpo` and `rloo` [default: those of an optimizer step]"})
    steps_per_generation: int | None = field(default=None, metadata={"help": "Micro-batches of `per_device_train_batch_size` per update, with the presets `grpo` and `rloo` [default: `gradient_accumulation_steps`]"})
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps, rounded up to whole updates, with the presets `grpo` and `rloo` [default: `num_train_epochs` over the prompts]"})
    num_mini_batches: int = field(default=1, metadata={"help": "Mini-batches per PPO epoch, one optimizer step each; must divide the number of responses of an update"})
    total_episodes: int | None = field(default=None, metadata={"help": "Number of responses to train on, rounded up to whole updates [default: `num_train_epochs` times the prompts]"})
    response_length: int = field(default=53, metadata={"help": "Maximum tokens of a response", "aliases": ["--max_completion_length"]})
    stop_token: str | None = field(default=None, metadata={"help": "Truncate responses after this token: `eos` is the tokenizer's, or another one named in `generation_config.json`: eos"})
    temperature: float = field(default=0.7, metadata={"help": "Temperature of sampling and of all log-probabilities"})
    num_ppo_epochs: int = field(default=4, metadata={"help": "PPO epochs: passes over the responses of an update", "aliases": ["--num_iterations", "--ppo_epochs"]})
    score_position: str = field(default='after_stop', metadata={"help": "Position of the score: the one after the stop token, or the response's last token: after_stop, last_token"})
    kl_coef: float = field(default=0.05, metadata={"help": "Coefficient of the KL penalty per token", "aliases": ["--beta", "--init_kl_coef"]})
    kl_estimator: str = field(default='k1', metadata={"help": "Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary: k1, k3, abs, mse, full", "aliases": ["--kl_penalty"]})
    kl_in_loss: bool = field(default=False, metadata={"help": "Add the KL penalty to the policy's loss instead of the rewards"})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that sampled"})
    kl_coef_end: float | None = field(default=None, metadata={"help": "KL coefficient of the last update; it changes linearly from `kl_coef`"})
    whiten_rewards: bool = field(default=False, metadata={"help": "Scale the rewards of an update to variance 1"})
    whiten_advantages: str = field(default='batch', metadata={"help": "Whiten the advantages to mean 0 and variance 1, over the tokens of the whole update or of each mini-batch. With the estimators `gae`, `reinforce` and `reinforce_baseline`; the others have `scale_rewards` and `normalize_advantages`: batch, mini_batch, none"})
    advantage_estimator: str = field(default='gae', metadata={"help": "Estimator of the advantages. `gae` needs a value model; the others compare responses or use returns, and no value model is loaded. `rloo`, `grpo`, `dr_grpo` and `reinforce_baseline` compare the `num_generations` responses to a prompt, `remax` compares with a greedy response, `reinforce` is REINFORCE++: gae, rloo, grpo, dr_grpo, reinforce, reinforce_baseline, remax"})
    num_generations: int = field(default=1, metadata={"help": "Responses to each prompt, which make a group. Batch sizes count responses", "aliases": ["--n_samples_per_prompt"]})
    lam_policy: float | None = field(default=None, metadata={"help": "Lambda of the policy's advantages, where the returns of the value model keep `lam` (decoupled GAE) [default: `lam`]"})
    lam_policy_alpha: float | None = field(default=None, metadata={"help": "Lambda of the policy's advantages that follows the length of a response: 1 - 1 / (this * length) (VAPO uses 0.05)"})
    overlong_buffer_len: int | None = field(default=None, metadata={"help": "Last tokens of `response_length` in which a response is penalized, by its length up to `overlong_penalty_factor` (soft overlong penalty, DAPO)"})
    overlong_penalty_factor: float = field(default=1.0, metadata={"help": "Penalty of a response of `response_length` tokens, with `overlong_buffer_len`"})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor of the rewards"})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalized advantage estimation (GAE)"})
    cliprange: float = field(default=0.2, metadata={"help": "Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this", "aliases": ["--epsilon"]})
    cliprange_value: float = field(default=0.2, metadata={"help": "Clip range of the value loss: the new value is clipped to the old one plus or minus this"})
    vf_coef: float = field(default=0.1, metadata={"help": "Coefficient of the value loss"})
    loss_type: str = field(default='bnpo', metadata={"help": "The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its tokens; `grpo` the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum over all tokens, divided by the responses times `response_length`; `dapo` by the tokens of the whole update. `cispo`, `sapo` and `vespo` have objectives of their own: bnpo, grpo, dr_grpo, dapo, cispo, sapo, luspo, vespo"})
    importance_sampling_level: str = field(default='token', metadata={"help": "Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO); or their product, the ratio of the whole response: token, sequence, sequence_product"})
    cliprange_high: float | None = field(default=None, metadata={"help": "Upper clip range: the probability ratio is clipped to at most 1 plus this; for `cispo` to at most this [default: `cliprange`]", "aliases": ["--epsilon_high"]})
    dual_clip: float | None = field(default=None, metadata={"help": "Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3", "aliases": ["--delta"]})
    min_response_length: int = field(default=0, metadata={"help": "Exclude responses with fewer counted tokens from training. If none is left, the last ones that were trained on are used again"})
    mask_truncated_completions: bool = field(default=False, metadata={"help": "Mask responses that did not stop within `response_length` in the losses; their rewards still count in their groups"})
    last_value_in_loss: bool = field(default=True, metadata={"help": "Train the value after a response's last token too. Only with a `score_position` after that token"})
    unsupervised_dataset_name: str | None = field(default=None, metadata={"help": "Dataset of texts for a language-modelling loss beside that of the command (PPO-ptx): a file, a folder or a hub name"})
    value_head: bool = field(default=False, metadata={"help": "Use a value head on the policy's own trunk instead of a value model: one pass and one optimizer for both"})
    batch_size: int | None = field(default=None, metadata={"help": "Responses per update, with the preset `trl-legacy` [default: 128]"})
    mini_batch_size: int | None = field(default=None, metadata={"help": "Responses per mini-batch, with the preset `trl-legacy`; `gradient_accumulation_steps` mini-batches make an optimizer step [default: `batch_size` divided by `gradient_accumulation_steps`]"})
    value_use_peft: bool | None = field(default=None, metadata={"help": "Train LoRA adapters of the value model [default: `use_peft`]"})
    value_lora_r: int | None = field(default=None, metadata={"help": "Rank of the value model's adapters [default: `lora_r`]"})
    value_lora_target_modules: list[str] | None = field(default=None, metadata={"help": "Linear layers of the value model that get an adapter [default: `lora_target_modules`]"})
    value_lora_modules_to_save: list[str] | None = field(default=None, metadata={"help": "Modules of the value model that are trained in full [default: `lora_modules_to_save` without the LM head]"})
    learning_rate: float = field(default=3e-06, metadata={"help": "Peak learning rate"})
    max_grad_norm: float | None = field(default=None, metadata={"help": "Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice"})
    value_warmup_updates: int = field(default=0, metadata={"help": "Number of updates at the start that train only the value model"})
    value_learning_rate: float | None = field(default=None, metadata={"help": "Peak learning rate of the value model [default: `learning_rate`]"})
    value_lr_scheduler_type: str | None = field(default=None, metadata={"help": "Learning-rate schedule of the value model [default: `lr_scheduler_type`]: linear, cosine, cosine_with_min_lr, cosine_with_restarts, polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup"})
    value_lr_warmup_steps: int | None = field(default=None, metadata={"help": "Warm-up updates of the value model's learning rate [default: those of `warmup_steps` or `warmup_ratio`]"})
    value_weight_decay: float | None = field(default=None, metadata={"help": "Weight decay of the value model [default: `weight_decay`]"})
    value_max_grad_norm: float | None = field(default=None, metadata={"help": "Maximum norm of the value model's gradients; 0 turns clipping off [default: `max_grad_norm`]"})
    align_overflow: bool = field(default=False, metadata={"help": "With `fp16`, skip the optimizer step of both policy and value model if the gradients of either overflow"})
    print_answers: bool = field(default=False, metadata={"help": "Print and save some of the responses that the run trains on"})
    actor_zero_stage: str | None = field(default=None, metadata={"help": "`zero_stage` of the policy and of the reference model [default: `zero_stage`]: 0, 1, 2, 3"})
    critic_zero_stage: str | None = field(default=None, metadata={"help": "`zero_stage` of the value model [default: `zero_stage`]: 0, 1, 2, 3"})
    offload_optimizer: bool = field(default=False, metadata={"help": "`offload = optimizer` by the name that DeepSpeed and accelerate have for it; written as `offload`, as are the next two"})
    shuffle_dataset: bool | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing is padded"})
    world_size: int | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none or 1: the number of ranks is the launcher's"})
    model_adapter_name: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the reference is the policy without its adapters"})
    ref_adapter_name: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: the reference is the policy without its adapters"})
    num_total_batches: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: it is computed from the other sizes"})
    micro_batch_size: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: it is computed from the other sizes"})
    local_batch_size: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: it is computed from the other sizes"})
    local_mini_batch_size: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: it is computed from the other sizes"})
    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of TRL: `revision`, `dtype` and a quantization"})


@_with_names
@dataclass
class GRPOConfig(_Groups):
    """Settings of [`GRPOTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        reward_label (`str`, *optional*):
            Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
        new_reward_head (`bool`, *optional*, defaults to `False`):
            Add a randomly initialized score head to a reward model that has none.
        reward_weights (`list[float]`, *optional*):
            Weights of the rewards in their sum: NAME=X, separated by commas; X for all; or one X for each reward, in the
            order model, command, url, `reward_funcs` [default: 1].
        reward_normalize (`list[str]`, *optional*):
            Normalize a reward's scores: NAME=std divides by their running standard deviation, NAME=mean_std subtracts
            their running mean first.
        reward_scale (`list[str]`, *optional*):
            Factor of a reward's scores, as NAME=X; applied after `reward_normalize`.
        reward_clip (`list[str]`, *optional*):
            Clip a reward's scores to [-X, X], as NAME=X; applied after `reward_scale` and before `reward_weights`.
        reward_pair (`bool`, *optional*, defaults to `False`):
            Give prompt and response to reward models that are encoders as two segments, `[CLS] prompt [SEP] response
            [SEP]`, as OpenAssistant's DeBERTa reads them; without it as one text.
        reward_label_column (`str`, *optional*, defaults to `'label'`):
            Column of the dataset to send to a reward service as `labels`.
        reward_batch_size (`int`, *optional*, defaults to `32`):
            Responses per request to a reward service.
        reward_concurrency (`int`, *optional*, defaults to `4`):
            Concurrent requests to a reward service.
        reward_timeout (`float`, *optional*, defaults to `120.0`):
            Timeout in seconds for the next score of a reward program, or for a request to a service.
        reward_retries (`int`, *optional*, defaults to `3`):
            Retries after a reward program or service fails, before the run ends with an error.
        max_tool_calling_iterations (`int`, *optional*):
            Maximum number of turns with tool calls per response [default: no limit but its length].
        malformed_calls (`str`, *optional*, defaults to `'text'`):
            Treatment of a turn with a broken tool call: plain text, as in TRL, or a failed call whose error the policy
            sees: text, error.
        environment_failure_reward (`float`, *optional*):
            Reward of a row whose environment dies [default: the run ends with an error].
        max_environments (`int`, *optional*, defaults to `64`):
            Maximum number of sessions of environments that are open at a time; further rows wait.
        tool_timeout (`float`, *optional*, defaults to `30.0`):
            Time limit of a tool call in seconds.
        reset_timeout (`float`, *optional*, defaults to `60.0`):
            Time limit in seconds for the beginning and the end of a session, and for the start of its program.
        tool_output_limit (`str`, *optional*, defaults to `'64KB'`):
            Maximum size of the result of a tool call; a longer one is cut, with a mark that the policy sees.
        tool_memory (`str`, *optional*):
            Maximum address space of each process of tools and environments.
        tool_processes (`int`, *optional*):
            Number of processes and threads of the user above which tools and environments start no more.
        tool_env (`list[str]`, *optional*):
            Environment variables that tools and environments see although their names are those of secrets, such as
            HF_TOKEN.
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        max_prompt_length (`int`, *optional*):
            Maximum tokens of a prompt [default: the models' context minus `max_completion_length`].
        long_prompts (`str`, *optional*, defaults to `'error'`):
            Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side:
            error, drop, truncate_left, truncate_right.
        apply_chat_template (`bool`, *optional*, defaults to `False`):
            Put a prompt that is a string into the chat template, as a user message.
        system_prompt (`str`, *optional*):
            System message of every conversation that has none.
        generation_batch_size (`int`, *optional*):
            Responses per update over all ranks [default: those of an optimizer step].
        steps_per_generation (`int`, *optional*):
            Micro-batches of `per_device_train_batch_size` per update [default: `gradient_accumulation_steps`].
        max_steps (`int`, *optional*, defaults to `-1`):
            Optimizer steps, rounded up to whole updates [default: `num_train_epochs` over the prompts].
        train_batch_size (`int`, *optional*):
            Responses per update, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum sequences of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit
            with `train_batch_size`].
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per update: an update samples this times `per_device_train_batch_size` responses
            per rank.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Sequences of a rank per forward pass without gradients.
        total_episodes (`int`, *optional*):
            Number of responses to train on, rounded up to whole updates, in place of `max_steps` [default:
            `num_train_epochs` times the prompts and their responses].
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the prompts; no effect if `total_episodes` is set.
        num_sample_generations (`int`, *optional*, defaults to `10`):
            Approximate number of sample tables to show during the run; one more at its end. 0 for none.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Maximum tokens of a response.
        stop_token (`str`, *optional*, defaults to `'eos'`):
            Truncate responses after this token: `eos` is the tokenizer's, or another one named in
            `generation_config.json`: eos.
        stop_token_id (`int`, *optional*):
            Truncate responses after the token with this id.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of sampling and of all log-probabilities.
        top_k (`int`, *optional*, defaults to `0`):
            Sample from this many most likely tokens only; 0 for all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all.
        min_p (`float`, *optional*):
            Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that are in the prompt or the response already; 1 for none.
        min_new_tokens (`int`, *optional*, defaults to `0`):
            Minimum tokens of a response: nothing ends it before.
        stop_strings (`list[str]`, *optional*):
            End a response with the token that completes this text; repeat the flag for several texts.
        logprobs_of (`str`, *optional*, defaults to `'policy'`):
            Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the
            tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered.
        num_iterations (`int`, *optional*, defaults to `1`):
            Passes over the responses of an update.
        missing_eos_penalty (`float`, *optional*):
            Penalty subtracted from the score of a response without a stop token.
        non_eos_penalty (`bool`, *optional*, defaults to `False`):
            Replace the score of a response without a stop token by `penalty_reward_value`.
        penalty_reward_value (`float`, *optional*, defaults to `-1.0`):
            Score of a response without a stop token, with `non_eos_penalty`.
        beta (`float`, *optional*, defaults to `0.0`):
            Coefficient of the KL penalty per token.
        kl_estimator (`str`, *optional*, defaults to `'k3'`):
            Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary: k1, k3, abs, mse,
            full.
        kl_in_loss (`bool`, *optional*, defaults to `True`):
            Add the KL penalty to the policy's loss, as TRL's GRPOTrainer does, instead of the rewards.
        use_bias_correction_kl (`bool`, *optional*, defaults to `True`):
            Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that
            sampled.
        adap_kl_ctrl (`bool`, *optional*, defaults to `False`):
            Adapt the KL coefficient after each update, so that the KL per response approaches `target`.
        target (`float`, *optional*, defaults to `6.0`):
            Target KL per response of `adap_kl_ctrl`, in nats.
        horizon (`float`, *optional*, defaults to `10000.0`):
            Horizon of `adap_kl_ctrl` in responses; a smaller one adapts faster.
        kl_coef_end (`float`, *optional*):
            KL coefficient of the last update; it changes linearly from `beta`.
        advantage_estimator (`str`, *optional*, defaults to `'grpo'`):
            How the responses of a group are compared: `grpo` with their mean, `rloo` each with the others. `rlhf ppo`
            explains the other estimators, which need no group: gae, rloo, grpo, dr_grpo, reinforce, reinforce_baseline,
            remax.
        num_generations (`int`, *optional*, defaults to `8`):
            Responses to each prompt, which make a group. Batch sizes count responses.
        scale_rewards (`str`, *optional*, defaults to `'group'`):
            Standard deviation by which the advantages of `grpo` are divided: that of each group, that of the whole
            update, or none: group, batch, none.
        normalize_advantages (`bool`, *optional*, defaults to `False`):
            Normalize the advantages of `rloo` to mean 0 and standard deviation 1 over the responses of an update.
        multi_objective_aggregation (`str`, *optional*, defaults to `'sum_then_normalize'`):
            Combination of several rewards: `sum_then_normalize` compares their weighted sums; `normalize_then_sum`
            compares each reward by itself within its group first, and normalizes the weighted sums over the update
            (GDPO): sum_then_normalize, normalize_then_sum.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Replace groups whose scores are all equal, from which nothing is learned, by groups of the next prompts
            (dynamic sampling, DAPO).
        dynamic_filtering_reward_range (`list[float]`, *optional*):
            Replace groups whose mean score is not between these two numbers, LOW,HIGH (OpenRLHF's dynamic filtering).
        max_num_gen_batches (`int`, *optional*, defaults to `10`):
            Maximum batches of responses that an update samples for `dynamic_sampling` or
            `dynamic_filtering_reward_range`; groups that are still missing then are taken from those that were replaced.
        overlong_buffer_len (`int`, *optional*):
            Last tokens of `max_completion_length` in which a response is penalized, by its length up to
            `overlong_penalty_factor` (soft overlong penalty, DAPO).
        overlong_penalty_factor (`float`, *optional*, defaults to `1.0`):
            Penalty of a response of `max_completion_length` tokens, with `overlong_buffer_len`.
        sync_ref_model (`bool`, *optional*, defaults to `False`):
            Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps.
        ref_model_mixup_alpha (`float`, *optional*, defaults to `0.6`):
            Share of the policy in the updated reference model; 1 replaces it by the policy.
        ref_model_sync_steps (`int`, *optional*, defaults to `512`):
            Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled
            already are compared with the earlier one.
        epsilon (`float`, *optional*, defaults to `0.2`):
            Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this.
        loss_type (`str`, *optional*, defaults to `'dapo'`):
            The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its
            tokens; `grpo` the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum
            over all tokens, divided by the responses times `max_completion_length`; `dapo` by the tokens of the whole
            update. `cispo`, `sapo` and `vespo` have objectives of their own: bnpo, grpo, dr_grpo, dapo, cispo, sapo,
            luspo, vespo.
        importance_sampling_level (`str`, *optional*, defaults to `'token'`):
            Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO);
            or their product, the ratio of the whole response: token, sequence, sequence_product.
        epsilon_high (`float`, *optional*):
            Upper clip range: the probability ratio is clipped to at most 1 plus this; for `cispo` to at most this
            [default: `epsilon`].
        delta (`float`, *optional*):
            Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Entropy bonus coefficient: this times the entropy is subtracted from the policy's loss.
        use_adaptive_entropy (`bool`, *optional*, defaults to `False`):
            Change the entropy bonus coefficient after each optimizer step: it rises by `entropy_coef_delta` while the
            entropy is at most `entropy_target`, and falls above it, where there is no bonus. `entropy_coef` is its
            initial value.
        entropy_coef_min (`float`, *optional*, defaults to `0.0`):
            Minimum coefficient of `use_adaptive_entropy`.
        entropy_coef_max (`float`, *optional*, defaults to `1.0`):
            Maximum coefficient of `use_adaptive_entropy`.
        entropy_coef_delta (`float`, *optional*, defaults to `0.005`):
            Change of the coefficient of `use_adaptive_entropy` in an optimizer step.
        entropy_target (`float`, *optional*, defaults to `0.2`):
            Target of `use_adaptive_entropy`: mean entropy per token, in nats; near that of the first updates.
        target_kl (`float`, *optional*):
            Stop an update's epochs after one whose last mini-batch has a KL per token to the sampling policy above 1.5
            times this.
        ratio_threshold (`float`, *optional*):
            Skip the optimizer step of a mini-batch whose mean probability ratio is above this.
        top_entropy_quantile (`float`, *optional*, defaults to `1.0`):
            Share of the tokens, those of the highest entropy, that the policy's objective trains; takes one further
            forward pass if below 1.
        off_policy_mask_threshold (`float`, *optional*):
            Leave out responses with a negative advantage whose mean KL per token from the sampling policy is above this;
            takes one further forward pass.
        sapo_temperature_pos (`float`, *optional*, defaults to `1.0`):
            Temperature of the loss `sapo` where the advantage is positive.
        sapo_temperature_neg (`float`, *optional*, defaults to `1.05`):
            Temperature of the loss `sapo` where the advantage is negative.
        vespo_k_pos (`float`, *optional*, defaults to `2.0`):
            Power of the ratio in the loss `vespo` where the advantage is positive.
        vespo_lambda_pos (`float`, *optional*, defaults to `3.0`):
            Decay of the ratio in the loss `vespo` where the advantage is positive.
        vespo_k_neg (`float`, *optional*, defaults to `3.0`):
            Power of the ratio in the loss `vespo` where the advantage is negative.
        vespo_lambda_neg (`float`, *optional*, defaults to `2.0`):
            Decay of the ratio in the loss `vespo` where the advantage is negative.
        clip_reward_value (`float`, *optional*):
            Clip a response's whole score, scores of its tokens included, to plus or minus this when it becomes a reward.
        reward_clip_range (`list[float]`, *optional*):
            Clip a response's whole score to between these two numbers, LOW,HIGH.
        mask_truncated_completions (`bool`, *optional*, defaults to `False`):
            Mask responses that did not stop within `max_completion_length` in the losses; their rewards still count in
            their groups.
        eos_in_loss (`str`, *optional*, defaults to `'always'`):
            Whether a response's end-of-sequence token is in the losses. Excluded, it still gets the score. `unless_pad`
            excludes it where DeepSpeed-Chat pads with it: for all models but Llama, and for a Llama whose padding token
            it is: always, unless_pad, never.
        unsupervised_dataset_name (`str`, *optional*):
            Dataset of texts for a language-modelling loss beside the policy's own: a file, a folder or a hub name.
        unsupervised_dataset_config_name (`str`, *optional*):
            Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split.
        unsup_coef (`float`, *optional*, defaults to `27.8`):
            Coefficient of the language-modelling loss.
        enable_ema (`bool`, *optional*, defaults to `False`):
            Maintain a moving average of the policy's weights, and save it in the folder `ema`.
        ema_beta (`float`, *optional*, defaults to `0.992`):
            Decay of the moving average per optimizer step.
        raw_logprobs (`bool`, *optional*, defaults to `False`):
            Compute log-probabilities of the policy's own distribution, without `temperature`.
        num_shared_layers (`int`, *optional*):
            Number of lower layers that are frozen and shared with the reference model, so that memory holds them once.
        early_stopping (`bool`, *optional*, defaults to `False`):
            Stop an update's epochs at `target_kl`, which is 1 then unless it is set.
        use_score_scaling (`bool`, *optional*, defaults to `False`):
            Divide scores by the running standard deviation of all scores of the run.
        use_score_norm (`bool`, *optional*, defaults to `False`):
            With `use_score_scaling`, subtract the running mean of all scores of the run first.
        score_clip (`float`, *optional*):
            Clip scores to plus or minus this value, after `use_score_scaling`.
        learning_rate (`float`, *optional*, defaults to `1e-06`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        max_skipped_updates (`int`, *optional*, defaults to `3`):
            Stop after this many consecutive updates in which every optimizer step was skipped because a loss or a
            gradient was not finite.
        no_checks (`bool`, *optional*, defaults to `False`):
            Skip the checks at the start of the run: first probability ratio, first KL, and decoding.
        on_alarm (`list[str]`, *optional*):
            Action when an alarm is raised, as NAME=ACTION; repeat the flag for several. NAME is an alarm, such as
            runaway_kl, or all, for every alarm that is not named. ACTION: warn; stop, which saves a checkpoint and ends
            the run; rollback, which continues from the last checkpoint before the metric began to move, with half the
            learning rate and other samples [default: all=warn].
        max_rollbacks (`int`, *optional*, defaults to `3`):
            Rollbacks of a run, at most; the next alarm with that action stops it.
        compute_fp32_loss (`bool`, *optional*, defaults to `True`):
            Compute log-probabilities from float32 logits, for policy and reference model. Always on: `false` is refused.
        print_answers (`bool`, *optional*, defaults to `False`):
            Print and save some of the responses that the run trains on; TRL's log_completions does so every logging_steps
            updates.
        print_answers_interval (`int`, *optional*, defaults to `1`):
            Updates between two prints of `print_answers`.
        log_rollouts (`bool`, *optional*, defaults to `False`):
            Write all responses of every update to `output_dir/rollouts`, one Parquet file per update: tokens, scores,
            log-probabilities, values and advantages.
        rollouts_limit (`int`, *optional*):
            Number of newest updates whose rollouts are kept, with `log_rollouts` [default: all].
        enable_test_mode (`bool`, *optional*, defaults to `False`):
            Stop after the update `test_stop_step`; learning rates are those of the whole run.
        test_stop_step (`int`, *optional*, defaults to `0`):
            Last update of `enable_test_mode`, counted from 0.
        num_eval_prompts (`int`, *optional*, defaults to `128`):
            Maximum prompts in an evaluation: the first of the split.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        ds3_gather_for_generation (`bool`, *optional*, defaults to `True`):
            Gather the policy's whole parameters once for the generation of an update where they are sharded; `false`
            gathers them layer by layer for each token, with less memory and more time.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        logging_steps (`float`, *optional*, defaults to `10`):
            Of TRL or transformers; it has no effect here: each update is logged.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; expected none or true: prompts are drawn in a random order.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Of TRL or transformers; it has no effect here: an evaluation takes local_rollout_forward_batch_size prompts at
            a time.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        router_aux_loss_coef (`float`, *optional*):
            Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        dataset_prompt_column (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        log_completions (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        use_vllm (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_mode (`str`, *optional*, defaults to `'colocate'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_model_impl (`str`, *optional*, defaults to `'vllm'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_sleep_mode (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_base_url (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_host (`str`, *optional*, defaults to `'0.0.0.0'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_port (`int`, *optional*, defaults to `8000`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_group_port (`int`, *optional*, defaults to `51216`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.3`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_length (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_device (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_dtype (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_len (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_prefix_caching (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_continuous_batching (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        transformers_continuous_batching_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_paged (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        cache_implementation (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_importance_sampling_correction (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: the model that generates is the one that is trained.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `'sequence_mask'`):
            Of TRL or transformers; it has no effect here: the model that generates is the one that is trained.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`):
            Of TRL or transformers; it has no effect here: the model that generates is the one that is trained.
        vllm_importance_sampling_clip_min (`float`, *optional*):
            Of TRL or transformers; it has no effect here: the model that generates is the one that is trained.
        vllm_importance_sampling_cap (`float`, *optional*):
            Of TRL or transformers; it has no effect here: the model that generates is the one that is trained.
        vllm_structured_outputs_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        vllm_guided_decoding_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        generation_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: sampling has its own flags: top_k, top_p, min_p, repetition_penalty,
            min_new_tokens, stop_strings.
        disable_dropout (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: no model's own dropout is applied.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        num_generations_eval (`int`, *optional*):
            Of TRL or transformers; it has no effect here: an evaluation samples one response to each prompt.
        log_multimodal (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some.
        log_unique_prompts (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some.
        wandb_log_unique_prompts (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some.
        num_completions_to_print (`int`, *optional*):
            Of TRL or transformers; it has no effect here: print_answers shows a few.
        log_completions_hub_repo (`str`, *optional*):
            Of TRL or transformers; expected none: responses are written to output_dir only.
        cast_lm_head_to_fp32 (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: logits have the precision of the run, and their
            log-probabilities are float32.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'grpo'
    _names = {'response_length': 'max_completion_length', 'num_ppo_epochs': 'num_iterations', 'ppo_epochs': 'num_iterations', 'init_kl_coef': 'beta', 'kl_coef': 'beta', 'kl_penalty': 'kl_estimator', 'n_samples_per_prompt': 'num_generations', 'filter_groups': 'dynamic_sampling', 'cliprange': 'epsilon', 'cliprange_high': 'epsilon_high', 'dual_clip': 'delta', 'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'save_steps': None}

    beta: float = field(default=0.0, metadata={"help": "Coefficient of the KL penalty per token", "aliases": ["--init_kl_coef", "--kl_coef"]})
    kl_estimator: str = field(default='k3', metadata={"help": "Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary: k1, k3, abs, mse, full", "aliases": ["--kl_penalty"]})
    kl_in_loss: bool = field(default=True, metadata={"help": "Add the KL penalty to the policy's loss, as TRL's GRPOTrainer does, instead of the rewards"})
    use_bias_correction_kl: bool = field(default=True, metadata={"help": "Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that sampled"})
    advantage_estimator: str = field(default='grpo', metadata={"help": "How the responses of a group are compared: `grpo` with their mean, `rloo` each with the others. `rlhf ppo` explains the other estimators, which need no group: gae, rloo, grpo, dr_grpo, reinforce, reinforce_baseline, remax"})
    num_generations: int = field(default=8, metadata={"help": "Responses to each prompt, which make a group. Batch sizes count responses", "aliases": ["--n_samples_per_prompt"]})
    loss_type: str = field(default='dapo', metadata={"help": "The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its tokens; `grpo` the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum over all tokens, divided by the responses times `max_completion_length`; `dapo` by the tokens of the whole update. `cispo`, `sapo` and `vespo` have objectives of their own: bnpo, grpo, dr_grpo, dapo, cispo, sapo, luspo, vespo"})
    importance_sampling_level: str = field(default='token', metadata={"help": "Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO); or their product, the ratio of the whole response: token, sequence, sequence_product"})
    vllm_importance_sampling_correction: bool = field(default=True, metadata={"help": "Of TRL or transformers; it has no effect here: the model that generates is the one that is trained"})
    vllm_importance_sampling_mode: str = field(default='sequence_mask', metadata={"help": "Of TRL or transformers; it has no effect here: the model that generates is the one that is trained"})
    vllm_importance_sampling_clip_max: float | None = field(default=3.0, metadata={"help": "Of TRL or transformers; it has no effect here: the model that generates is the one that is trained"})
    vllm_importance_sampling_clip_min: float | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: the model that generates is the one that is trained"})
    vllm_importance_sampling_cap: float | None = field(default=None, metadata={"help": "Of TRL or transformers; it has no effect here: the model that generates is the one that is trained"})
    log_completions_hub_repo: str | None = field(default=None, metadata={"help": "Of TRL or transformers; expected none: responses are written to output_dir only"})
    cast_lm_head_to_fp32: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: logits have the precision of the run, and their log-probabilities are float32"})


@_with_names
@dataclass
class RLOOConfig(_Groups):
    """Settings of [`RLOOTrainer`].

    An unknown name is a `TypeError`; [`Config`] has what all configurations can do.

    Args:
        output_dir (`str`, *optional*):
            Folder for the model, the metrics and the resolved configuration.
        reward_label (`str`, *optional*):
            Label of the reward model to use as the score, by name or number, or a difference such as POSITIVE-NEGATIVE.
        new_reward_head (`bool`, *optional*, defaults to `False`):
            Add a randomly initialized score head to a reward model that has none.
        reward_weights (`list[float]`, *optional*):
            Weights of the rewards in their sum: NAME=X, separated by commas; X for all; or one X for each reward, in the
            order model, command, url, `reward_funcs` [default: 1].
        reward_normalize (`list[str]`, *optional*):
            Normalize a reward's scores: NAME=std divides by their running standard deviation, NAME=mean_std subtracts
            their running mean first.
        reward_scale (`list[str]`, *optional*):
            Factor of a reward's scores, as NAME=X; applied after `reward_normalize`.
        reward_clip (`list[str]`, *optional*):
            Clip a reward's scores to [-X, X], as NAME=X; applied after `reward_scale` and before `reward_weights`.
        reward_pair (`bool`, *optional*, defaults to `False`):
            Give prompt and response to reward models that are encoders as two segments, `[CLS] prompt [SEP] response
            [SEP]`, as OpenAssistant's DeBERTa reads them; without it as one text.
        reward_label_column (`str`, *optional*, defaults to `'label'`):
            Column of the dataset to send to a reward service as `labels`.
        reward_batch_size (`int`, *optional*, defaults to `32`):
            Responses per request to a reward service.
        reward_concurrency (`int`, *optional*, defaults to `4`):
            Concurrent requests to a reward service.
        reward_timeout (`float`, *optional*, defaults to `120.0`):
            Timeout in seconds for the next score of a reward program, or for a request to a service.
        reward_retries (`int`, *optional*, defaults to `3`):
            Retries after a reward program or service fails, before the run ends with an error.
        max_tool_calling_iterations (`int`, *optional*):
            Maximum number of turns with tool calls per response [default: no limit but its length].
        malformed_calls (`str`, *optional*, defaults to `'text'`):
            Treatment of a turn with a broken tool call: plain text, as in TRL, or a failed call whose error the policy
            sees: text, error.
        environment_failure_reward (`float`, *optional*):
            Reward of a row whose environment dies [default: the run ends with an error].
        max_environments (`int`, *optional*, defaults to `64`):
            Maximum number of sessions of environments that are open at a time; further rows wait.
        tool_timeout (`float`, *optional*, defaults to `30.0`):
            Time limit of a tool call in seconds.
        reset_timeout (`float`, *optional*, defaults to `60.0`):
            Time limit in seconds for the beginning and the end of a session, and for the start of its program.
        tool_output_limit (`str`, *optional*, defaults to `'64KB'`):
            Maximum size of the result of a tool call; a longer one is cut, with a mark that the policy sees.
        tool_memory (`str`, *optional*):
            Maximum address space of each process of tools and environments.
        tool_processes (`int`, *optional*):
            Number of processes and threads of the user above which tools and environments start no more.
        tool_env (`list[str]`, *optional*):
            Environment variables that tools and environments see although their names are those of secrets, such as
            HF_TOKEN.
        dataset_weights (`list[float]`, *optional*):
            Sampling weights of several datasets, a number for each [default: every row is equally likely].
        dataset_columns (`list[str]`, *optional*):
            Columns to read as other fields: FIELD=COLUMN, separated by commas, such as prompt=question. FIELD=none
            ignores a field.
        eval_split_size (`float`, *optional*):
            Number of rows to hold out for evaluation, or their share if below 1. Refused if the dataset has the split to
            evaluate on.
        data_split (`str`, *optional*):
            Train on this command's share of each dataset only: parts for sft, reward and ppo, such as 2,4,4. The shares
            are disjoint.
        data_split_seed (`int`, *optional*, defaults to `42`):
            Seed of `data_split`; must be the same for sft, reward and ppo.
        chat_template_kwargs (`dict[str, Any] | str`, *optional*):
            Variables of the chat template for every conversation, as JSON such as {"enable_thinking": false}; where rows
            have `chat_template_kwargs`, these take precedence by name.
        max_prompt_length (`int`, *optional*):
            Maximum tokens of a prompt [default: the models' context minus `max_completion_length`].
        long_prompts (`str`, *optional*, defaults to `'error'`):
            Handling of prompts longer than `max_prompt_length`: an error, or drop the prompt, or truncate it on one side:
            error, drop, truncate_left, truncate_right.
        apply_chat_template (`bool`, *optional*, defaults to `False`):
            Put a prompt that is a string into the chat template, as a user message.
        system_prompt (`str`, *optional*):
            System message of every conversation that has none.
        generation_batch_size (`int`, *optional*):
            Responses per update over all ranks [default: those of an optimizer step].
        steps_per_generation (`int`, *optional*):
            Micro-batches of `per_device_train_batch_size` per update [default: `gradient_accumulation_steps`].
        max_steps (`int`, *optional*, defaults to `-1`):
            Optimizer steps, rounded up to whole updates [default: `num_train_epochs` over the prompts].
        train_batch_size (`int`, *optional*):
            Responses per update, over all ranks [default: `per_device_train_batch_size` times
            `gradient_accumulation_steps` times the number of ranks].
        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Maximum sequences of a micro-batch, which is one forward and backward pass of a rank [default: 8; no limit
            with `train_batch_size`].
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-batches of each rank per update: an update samples this times `per_device_train_batch_size` responses
            per rank.
        local_rollout_forward_batch_size (`int`, *optional*, defaults to `64`):
            Sequences of a rank per forward pass without gradients.
        total_episodes (`int`, *optional*):
            Number of responses to train on, rounded up to whole updates, in place of `max_steps` [default:
            `num_train_epochs` times the prompts and their responses].
        num_train_epochs (`float`, *optional*, defaults to `3.0`):
            Epochs over the prompts; no effect if `total_episodes` is set.
        num_sample_generations (`int`, *optional*, defaults to `10`):
            Approximate number of sample tables to show during the run; one more at its end. 0 for none.
        max_completion_length (`int`, *optional*, defaults to `512`):
            Maximum tokens of a response.
        stop_token (`str`, *optional*, defaults to `'eos'`):
            Truncate responses after this token: `eos` is the tokenizer's, or another one named in
            `generation_config.json`: eos.
        stop_token_id (`int`, *optional*):
            Truncate responses after the token with this id.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of sampling and of all log-probabilities.
        top_k (`int`, *optional*, defaults to `0`):
            Sample from this many most likely tokens only; 0 for all.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus sampling: sample from the fewest most likely tokens with this total probability; 1 for all.
        min_p (`float`, *optional*):
            Sample from tokens with at least this fraction of the probability of the most likely one; 0 for all.
        repetition_penalty (`float`, *optional*, defaults to `1.0`):
            Penalty on tokens that are in the prompt or the response already; 1 for none.
        min_new_tokens (`int`, *optional*, defaults to `0`):
            Minimum tokens of a response: nothing ends it before.
        stop_strings (`list[str]`, *optional*):
            End a response with the token that completes this text; repeat the flag for several texts.
        logprobs_of (`str`, *optional*, defaults to `'policy'`):
            Distribution of log-probabilities: the `policy`'s over the whole vocabulary, or the `filtered` one over the
            tokens that `top_k`, `top_p` and `min_p` left when a response was sampled: policy, filtered.
        num_iterations (`int`, *optional*, defaults to `1`):
            Passes over the responses of an update.
        missing_eos_penalty (`float`, *optional*):
            Penalty subtracted from the score of a response without a stop token.
        non_eos_penalty (`bool`, *optional*, defaults to `False`):
            Replace the score of a response without a stop token by `penalty_reward_value`.
        penalty_reward_value (`float`, *optional*, defaults to `-1.0`):
            Score of a response without a stop token, with `non_eos_penalty`.
        beta (`float`, *optional*, defaults to `0.05`):
            Coefficient of the KL penalty per token.
        kl_estimator (`str`, *optional*, defaults to `'k1'`):
            Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary: k1, k3, abs, mse,
            full.
        kl_in_loss (`bool`, *optional*, defaults to `False`):
            Add the KL penalty to the policy's loss, as TRL's GRPOTrainer does, instead of the rewards.
        use_bias_correction_kl (`bool`, *optional*, defaults to `False`):
            Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that
            sampled.
        adap_kl_ctrl (`bool`, *optional*, defaults to `False`):
            Adapt the KL coefficient after each update, so that the KL per response approaches `target`.
        target (`float`, *optional*, defaults to `6.0`):
            Target KL per response of `adap_kl_ctrl`, in nats.
        horizon (`float`, *optional*, defaults to `10000.0`):
            Horizon of `adap_kl_ctrl` in responses; a smaller one adapts faster.
        kl_coef_end (`float`, *optional*):
            KL coefficient of the last update; it changes linearly from `beta`.
        advantage_estimator (`str`, *optional*, defaults to `'rloo'`):
            How the responses of a group are compared: `grpo` with their mean, `rloo` each with the others. `rlhf ppo`
            explains the other estimators, which need no group: gae, rloo, grpo, dr_grpo, reinforce, reinforce_baseline,
            remax.
        num_generations (`int`, *optional*, defaults to `2`):
            Responses to each prompt, which make a group. Batch sizes count responses.
        scale_rewards (`str`, *optional*, defaults to `'group'`):
            Standard deviation by which the advantages of `grpo` are divided: that of each group, that of the whole
            update, or none: group, batch, none.
        normalize_advantages (`bool`, *optional*, defaults to `False`):
            Normalize the advantages of `rloo` to mean 0 and standard deviation 1 over the responses of an update.
        multi_objective_aggregation (`str`, *optional*, defaults to `'sum_then_normalize'`):
            Combination of several rewards: `sum_then_normalize` compares their weighted sums; `normalize_then_sum`
            compares each reward by itself within its group first, and normalizes the weighted sums over the update
            (GDPO): sum_then_normalize, normalize_then_sum.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Replace groups whose scores are all equal, from which nothing is learned, by groups of the next prompts
            (dynamic sampling, DAPO).
        dynamic_filtering_reward_range (`list[float]`, *optional*):
            Replace groups whose mean score is not between these two numbers, LOW,HIGH (OpenRLHF's dynamic filtering).
        max_num_gen_batches (`int`, *optional*, defaults to `10`):
            Maximum batches of responses that an update samples for `dynamic_sampling` or
            `dynamic_filtering_reward_range`; groups that are still missing then are taken from those that were replaced.
        overlong_buffer_len (`int`, *optional*):
            Last tokens of `max_completion_length` in which a response is penalized, by its length up to
            `overlong_penalty_factor` (soft overlong penalty, DAPO).
        overlong_penalty_factor (`float`, *optional*, defaults to `1.0`):
            Penalty of a response of `max_completion_length` tokens, with `overlong_buffer_len`.
        sync_ref_model (`bool`, *optional*, defaults to `False`):
            Move the reference model towards the policy every `ref_model_sync_steps` optimizer steps.
        ref_model_mixup_alpha (`float`, *optional*, defaults to `0.6`):
            Share of the policy in the updated reference model; 1 replaces it by the policy.
        ref_model_sync_steps (`int`, *optional*, defaults to `512`):
            Optimizer steps between two updates of the reference model; responses that `ppo` and `grpo` have sampled
            already are compared with the earlier one.
        epsilon (`float`, *optional*, defaults to `0.2`):
            Clip range of the policy loss: the probability ratio is clipped to 1 plus or minus this.
        loss_type (`str`, *optional*, defaults to `'grpo'`):
            The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its
            tokens; `grpo` the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum
            over all tokens, divided by the responses times `max_completion_length`; `dapo` by the tokens of the whole
            update. `cispo`, `sapo` and `vespo` have objectives of their own: bnpo, grpo, dr_grpo, dapo, cispo, sapo,
            luspo, vespo.
        importance_sampling_level (`str`, *optional*, defaults to `'sequence_product'`):
            Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO);
            or their product, the ratio of the whole response: token, sequence, sequence_product.
        epsilon_high (`float`, *optional*):
            Upper clip range: the probability ratio is clipped to at most 1 plus this; for `cispo` to at most this
            [default: `epsilon`].
        delta (`float`, *optional*):
            Dual-clip constant above 1: bounds the probability ratio where the advantage is negative; typically 3.
        entropy_coef (`float`, *optional*, defaults to `0.0`):
            Entropy bonus coefficient: this times the entropy is subtracted from the policy's loss.
        use_adaptive_entropy (`bool`, *optional*, defaults to `False`):
            Change the entropy bonus coefficient after each optimizer step: it rises by `entropy_coef_delta` while the
            entropy is at most `entropy_target`, and falls above it, where there is no bonus. `entropy_coef` is its
            initial value.
        entropy_coef_min (`float`, *optional*, defaults to `0.0`):
            Minimum coefficient of `use_adaptive_entropy`.
        entropy_coef_max (`float`, *optional*, defaults to `1.0`):
            Maximum coefficient of `use_adaptive_entropy`.
        entropy_coef_delta (`float`, *optional*, defaults to `0.005`):
            Change of the coefficient of `use_adaptive_entropy` in an optimizer step.
        entropy_target (`float`, *optional*, defaults to `0.2`):
            Target of `use_adaptive_entropy`: mean entropy per token, in nats; near that of the first updates.
        target_kl (`float`, *optional*):
            Stop an update's epochs after one whose last mini-batch has a KL per token to the sampling policy above 1.5
            times this.
        ratio_threshold (`float`, *optional*):
            Skip the optimizer step of a mini-batch whose mean probability ratio is above this.
        top_entropy_quantile (`float`, *optional*, defaults to `1.0`):
            Share of the tokens, those of the highest entropy, that the policy's objective trains; takes one further
            forward pass if below 1.
        off_policy_mask_threshold (`float`, *optional*):
            Leave out responses with a negative advantage whose mean KL per token from the sampling policy is above this;
            takes one further forward pass.
        sapo_temperature_pos (`float`, *optional*, defaults to `1.0`):
            Temperature of the loss `sapo` where the advantage is positive.
        sapo_temperature_neg (`float`, *optional*, defaults to `1.05`):
            Temperature of the loss `sapo` where the advantage is negative.
        vespo_k_pos (`float`, *optional*, defaults to `2.0`):
            Power of the ratio in the loss `vespo` where the advantage is positive.
        vespo_lambda_pos (`float`, *optional*, defaults to `3.0`):
            Decay of the ratio in the loss `vespo` where the advantage is positive.
        vespo_k_neg (`float`, *optional*, defaults to `3.0`):
            Power of the ratio in the loss `vespo` where the advantage is negative.
        vespo_lambda_neg (`float`, *optional*, defaults to `2.0`):
            Decay of the ratio in the loss `vespo` where the advantage is negative.
        clip_reward_value (`float`, *optional*):
            Clip a response's whole score, scores of its tokens included, to plus or minus this when it becomes a reward.
        reward_clip_range (`list[float]`, *optional*):
            Clip a response's whole score to between these two numbers, LOW,HIGH.
        mask_truncated_completions (`bool`, *optional*, defaults to `False`):
            Mask responses that did not stop within `max_completion_length` in the losses; their rewards still count in
            their groups.
        eos_in_loss (`str`, *optional*, defaults to `'always'`):
            Whether a response's end-of-sequence token is in the losses. Excluded, it still gets the score. `unless_pad`
            excludes it where DeepSpeed-Chat pads with it: for all models but Llama, and for a Llama whose padding token
            it is: always, unless_pad, never.
        unsupervised_dataset_name (`str`, *optional*):
            Dataset of texts for a language-modelling loss beside the policy's own: a file, a folder or a hub name.
        unsupervised_dataset_config_name (`str`, *optional*):
            Configuration (folder) of `unsupervised_dataset_name` to use, if several have the split.
        unsup_coef (`float`, *optional*, defaults to `27.8`):
            Coefficient of the language-modelling loss.
        enable_ema (`bool`, *optional*, defaults to `False`):
            Maintain a moving average of the policy's weights, and save it in the folder `ema`.
        ema_beta (`float`, *optional*, defaults to `0.992`):
            Decay of the moving average per optimizer step.
        raw_logprobs (`bool`, *optional*, defaults to `False`):
            Compute log-probabilities of the policy's own distribution, without `temperature`.
        num_shared_layers (`int`, *optional*):
            Number of lower layers that are frozen and shared with the reference model, so that memory holds them once.
        early_stopping (`bool`, *optional*, defaults to `False`):
            Stop an update's epochs at `target_kl`, which is 1 then unless it is set.
        use_score_scaling (`bool`, *optional*, defaults to `False`):
            Divide scores by the running standard deviation of all scores of the run.
        use_score_norm (`bool`, *optional*, defaults to `False`):
            With `use_score_scaling`, subtract the running mean of all scores of the run first.
        score_clip (`float`, *optional*):
            Clip scores to plus or minus this value, after `use_score_scaling`.
        learning_rate (`float`, *optional*, defaults to `1e-06`):
            Peak learning rate.
        optim (`str`, *optional*, defaults to `'adamw_torch'`):
            Optimizer; all but `adamw_torch` hold smaller states: adamw_torch, adamw_8bit, adafactor, adamw_bf16.
        lr_scheduler_type (`str`, *optional*, defaults to `'linear'`):
            Learning-rate schedule after the warm-up: linear, cosine, cosine_with_min_lr, cosine_with_restarts,
            polynomial, inverse_sqrt, warmup_stable_decay, constant, constant_with_warmup.
        warmup_steps (`float`, *optional*, defaults to `0`):
            Updates over which the learning rate rises from 0 to its peak; optimizer steps in SFT and reward training, and
            with `grpo` and `rloo`.
        warmup_ratio (`float`, *optional*, defaults to `0.0`):
            Warm-up as a share of all updates, rounded up.
        lr_end (`float`, *optional*):
            Final learning rate [default: 0, and 1e-7 with `polynomial`].
        min_lr_rate (`float`, *optional*):
            Final learning rate as a share of the peak, in place of `lr_end`.
        num_cycles (`float`, *optional*):
            Number of cosine cycles [default: 0.5, one decay from the peak to the final rate; with `cosine_with_restarts`
            1, its decays].
        num_decay_steps (`int`, *optional*):
            Number of updates at the end of `warmup_stable_decay` over which the learning rate decays; of optimizer steps
            with `rlhf grpo` and `rlhf rloo`.
        decay_type (`str`, *optional*, defaults to `'cosine'`):
            Form of the decay of `warmup_stable_decay`: cosine, linear, 1-sqrt.
        power (`float`, *optional*, defaults to `1.0`):
            Power of the `polynomial` schedule.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Decoupled weight decay.
        adam_beta1 (`float`, *optional*, defaults to `0.9`):
            AdamW's beta1, the decay rate of the mean of the gradients; Adafactor has none.
        adam_beta2 (`float`, *optional*, defaults to `0.999`):
            AdamW's beta2, the decay rate of the mean of the squared gradients; Adafactor's is of its own.
        adam_epsilon (`float`, *optional*, defaults to `1e-08`):
            AdamW's epsilon; Adafactor's is of its own.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Maximum norm of the gradients; none or 0 turns clipping off, 1 is a good choice.
        max_skipped_updates (`int`, *optional*, defaults to `3`):
            Stop after this many consecutive updates in which every optimizer step was skipped because a loss or a
            gradient was not finite.
        no_checks (`bool`, *optional*, defaults to `False`):
            Skip the checks at the start of the run: first probability ratio, first KL, and decoding.
        on_alarm (`list[str]`, *optional*):
            Action when an alarm is raised, as NAME=ACTION; repeat the flag for several. NAME is an alarm, such as
            runaway_kl, or all, for every alarm that is not named. ACTION: warn; stop, which saves a checkpoint and ends
            the run; rollback, which continues from the last checkpoint before the metric began to move, with half the
            learning rate and other samples [default: all=warn].
        max_rollbacks (`int`, *optional*, defaults to `3`):
            Rollbacks of a run, at most; the next alarm with that action stops it.
        compute_fp32_loss (`bool`, *optional*, defaults to `True`):
            Compute log-probabilities from float32 logits, for policy and reference model. Always on: `false` is refused.
        print_answers (`bool`, *optional*, defaults to `False`):
            Print and save some of the responses that the run trains on; TRL's log_completions does so every logging_steps
            updates.
        print_answers_interval (`int`, *optional*, defaults to `1`):
            Updates between two prints of `print_answers`.
        log_rollouts (`bool`, *optional*, defaults to `False`):
            Write all responses of every update to `output_dir/rollouts`, one Parquet file per update: tokens, scores,
            log-probabilities, values and advantages.
        rollouts_limit (`int`, *optional*):
            Number of newest updates whose rollouts are kept, with `log_rollouts` [default: all].
        enable_test_mode (`bool`, *optional*, defaults to `False`):
            Stop after the update `test_stop_step`; learning rates are those of the whole run.
        test_stop_step (`int`, *optional*, defaults to `0`):
            Last update of `enable_test_mode`, counted from 0.
        num_eval_prompts (`int`, *optional*, defaults to `128`):
            Maximum prompts in an evaluation: the first of the split.
        eval_steps (`float | str`, *optional*):
            Evaluate on the held-out rows every this many updates (optimizer steps in SFT and reward training), or each
            `epoch`, before the first, and after the last.
        metric_for_best_model (`str`, *optional*):
            Save the model with the best value of this metric in `output_dir/best`. Compared after each evaluation;
            without evaluations, every `save_steps`.
        greater_is_better (`bool`, *optional*):
            Whether a greater value of `metric_for_best_model` is better [default: true, but false for a loss or a KL].
        ds3_gather_for_generation (`bool`, *optional*, defaults to `True`):
            Gather the policy's whole parameters once for the generation of an update where they are sharded; `false`
            gathers them layer by layer for each token, with less memory and more time.
        overwrite_output_dir (`bool`, *optional*, defaults to `False`):
            Replace the run in `output_dir`.
        seed (`int`, *optional*, defaults to `42`):
            Seed of everything random.
        bf16 (`bool`, *optional*, defaults to `False`):
            Compute in bfloat16, with float32 weights in the optimizer (bfloat16 with `adamw_bf16`).
        fp16 (`bool`, *optional*, defaults to `False`):
            Compute in float16 with dynamic loss scaling, and float32 weights in the optimizer.
        initial_scale_power (`int`, *optional*, defaults to `16`):
            Initial loss scale with `fp16`, as a power of 2.
        loss_scale_window (`int`, *optional*, defaults to `1000`):
            Consecutive optimizer steps without an overflow after which the loss scale is doubled.
        hysteresis (`int`, *optional*, defaults to `2`):
            Overflows since the loss scale was last doubled from which on each overflow halves it. Every overflow skips
            its optimizer step.
        min_loss_scale (`float`, *optional*, defaults to `1.0`):
            Smallest loss scale.
        device (`str`, *optional*, defaults to `'auto'`):
            Device to compute on: cpu, cuda, cuda:N, or `auto` for a GPU if there is one.
        save_dtype (`str`, *optional*, defaults to `'auto'`):
            Dtype of the weights of the final and the best model; `auto` is that in which they are trained. Checkpoints
            and adapters do not depend on it: auto, float32, bfloat16, float16.
        max_shard_size (`str`, *optional*, defaults to `'50GB'`):
            Maximum size of each file of saved weights, such as 5GB or 500MB.
        gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Recompute each layer in the backward pass instead of storing its activations: less memory, more time.
        max_tokens_per_micro_batch (`str`, *optional*):
            Maximum tokens per forward and backward pass, or the memory of their activations, such as 4GB; does not change
            the result [default: by the available memory].
        offload (`list[str]`, *optional*):
            Parts that are offloaded between the phases that use them: optimizer, its state; models, the reference and
            reward models; all, both. On the CPU they are in a file of `offload_dir`, with the same results; from a GPU
            they go to the memory of the host. Less memory, more time. Without a value: optimizer: none, optimizer,
            models, all.
        offload_dir (`str`, *optional*):
            Folder on a disk for the files of `offload`, which have no names and are gone when the run ends [default:
            `output_dir`].
        report_to (`None | str | list[str]`, *optional*, defaults to `'none'`):
            Where to report the run besides the files of `output_dir`: tensorboard, wandb, mlflow, trackio, or
            command:PROGRAM for a program that reads JSON lines; several are separated by spaces. `all` is TensorBoard and
            each tracker whose Python package is installed.
        tensorboard_tags (`str`, *optional*, defaults to `'plain'`):
            Names of the metrics in TensorBoard and in the trackers: `plain` as in `metrics.jsonl`, `trl` as in TRL's
            trainers, such as `train/objective/kl` and `eval/loss`: plain, trl.
        run_name (`str`, *optional*):
            Name of the run in trackers [default: the name of `output_dir`].
        project (`str`, *optional*):
            Project of the run in wandb and trackio, and experiment in MLflow [default: as WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else rlhf].
        tracker_kwargs (`dict[str, Any] | str`, *optional*):
            Further arguments of the trackers' clients, as a JSON object for each tracker, such as '{"wandb": {"entity":
            "team"}}'.
        log_model (`bool`, *optional*, defaults to `False`):
            Upload the model in `output_dir` to the trackers at the end of the run.
        num_threads (`int`, *optional*):
            Number of threads for tensor operations [default: one per core].
        disable_tqdm (`bool`, *optional*):
            Hide the progress bar.
        no_report (`bool`, *optional*, defaults to `False`):
            Do not write `report.html`, a page that shows the run, at its end.
        save_steps (`float | str`, *optional*, defaults to `500`):
            Save a checkpoint every this many updates (optimizer steps in SFT and reward training), or each `epoch`, and
            after the last. If unset, only a run that stops early saves one.
        save_total_limit (`int`, *optional*):
            Number of newest checkpoints to keep [default: all].
        resume_with_changed_inputs (`bool`, *optional*, defaults to `False`):
            Resume even if data or models have changed since the run started.
        push_to_hub (`bool`, *optional*, defaults to `False`):
            Push the model to the Hugging Face hub; needs hub_model_id, and an access token in HF_TOKEN.
        hub_model_id (`str`, *optional*):
            Repository to push to, such as me/my-model; created if it does not exist.
        hub_revision (`str`, *optional*):
            Branch to push to, created if it does not exist [default: main].
        hub_private_repo (`bool`, *optional*):
            Whether a new repository is private [default: as its owner has set, usually public].
        hub_strategy (`str`, *optional*, defaults to `'every_save'`):
            When to push: `every_save` after each checkpoint and at the end, `end` at the end only, `best` each new best
            model: end, every_save, best.
        hub_always_push (`bool`, *optional*, defaults to `False`):
            Push each checkpoint. Otherwise one that is due while an earlier one is still being uploaded is left out.
        hub_token (`str`, *optional*):
            Access token with write access [default: HF_TOKEN, which no list of processes shows].
        zero_stage (`str`, *optional*, defaults to `'0'`):
            Shard over the ranks: 1 the optimizer state, 2 gradients too, 3 parameters too, also of frozen models; 0
            nothing: 0, 1, 2, 3.
        dist_timeout (`int`, *optional*, defaults to `1800`):
            Maximum seconds that a rank waits for the others.
        logging_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_dir (`str`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_first_step (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_on_each_node (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level (`str`, *optional*, defaults to `'passive'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        log_level_replica (`str`, *optional*, defaults to `'warning'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_num_input_tokens_seen (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_tokens_per_second (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_for_metrics (`list[str]`, *optional*):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        include_inputs_for_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: metrics go to output_dir, by logging_steps and report_to.
        trackio_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_bucket_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        trackio_static_space_id (`str`, *optional*):
            Of TRL or transformers; it has no effect here: arguments of trackio are entries of tracker_kwargs.
        logging_steps (`float`, *optional*, defaults to `10`):
            Of TRL or transformers; it has no effect here: each update is logged.
        dataset_num_proc (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataset_batch_size (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_num_workers (`int`, *optional*, defaults to `0`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_persistent_workers (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_prefetch_factor (`int`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_multiprocessing_context (`str`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        dataloader_in_order (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        remove_unused_columns (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        length_column_name (`str`, *optional*, defaults to `'length'`):
            Of TRL or transformers; it has no effect here: a dataset is read into memory whole before the run, and nothing
            is padded.
        shuffle_dataset (`bool`, *optional*):
            Of TRL or transformers; expected none or true: prompts are drawn in a random order.
        average_tokens_across_devices (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        accelerator_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_find_unused_parameters (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_bucket_cap_mb (`int`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_broadcast_buffers (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_static_graph (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ddp_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        save_on_each_node (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        eval_use_gather_object (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_min_num_params (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        fsdp_transformer_layer_cls_to_wrap (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        dispatch_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        split_batches (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        ray_scope (`str`, *optional*):
            Of TRL or transformers; it has no effect here: losses, gradients and rows are those of all ranks in any case.
        torch_compile (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_compile_mode (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torchdynamo (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_liger_loss (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        liger_kernel_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        use_cache (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        torch_empty_cache_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        gradient_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        activation_checkpointing_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        debug (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        skip_memory_metrics (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_accumulation_steps (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        eval_do_concat_batches (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        batch_eval_metrics (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        prediction_loss_only (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        low_cpu_mem_usage (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        per_device_eval_batch_size (`int`, *optional*, defaults to `8`):
            Of TRL or transformers; it has no effect here: an evaluation takes local_rollout_forward_batch_size prompts at
            a time.
        save_only_model (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        enable_jit_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        restore_callback_states_from_checkpoint (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: checkpoints are always complete, and a stopped run saves one.
        do_train (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        do_predict (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: the command decides what is done.
        push_to_hub_organization (`str`, *optional*):
            Of TRL or transformers; expected none: the organization is part of hub_model_id: ORGANIZATION/NAME.
        full_determinism (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: two runs with the same seed are identical.
        router_aux_loss_coef (`float`, *optional*):
            Of TRL or transformers; it has no effect here: there is no auxiliary loss of a router of experts.
        half_precision_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_backend (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        fp16_opt_level (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_legacy_prediction_loop (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_num_cores (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        tpu_metrics_debug (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        mp_parameters (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        jit_mode_eval (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        use_ipex (`str`, *optional*):
            Of TRL or transformers; it has no effect here: it has no meaning for this program.
        eval_strategy (`str`, *optional*, defaults to `'no'`):
            Of TRL or transformers.
        save_strategy (`str`, *optional*, defaults to `'steps'`):
            Of TRL or transformers.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: code that comes with a model is never run.
        adafactor (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: set optim = adafactor.
        optim_args (`str`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        optim_target_modules (`None | str | list[str]`, *optional*):
            Of TRL or transformers; expected none: the optimizer's settings are flags of their own.
        lr_scheduler_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        label_smoothing_factor (`float`, *optional*, defaults to `0.0`):
            Of TRL or transformers; expected none or 0 or 0.0: labels are not smoothed.
        neftune_noise_alpha (`float`, *optional*):
            Of TRL or transformers; expected none: no noise is added to embeddings.
        bf16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        fp16_full_eval (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: an evaluation computes in the precision of the training.
        tf32 (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: float32 products keep full precision.
        eval_delay (`float`, *optional*, defaults to `0`):
            Of TRL or transformers; expected none or 0 or 0.0: evaluations run every eval_steps from the start.
        eval_on_start (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: with eval_steps there is an evaluation before the first update.
        load_best_model_at_end (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: output_dir holds the last model, and the best one in its
            folder `best`.
        ignore_data_skip (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: a resumed run continues with the rows that are left.
        data_seed (`int`, *optional*):
            Of TRL or transformers; expected none: seed is the seed of everything random.
        dataloader_drop_last (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: every row is trained on.
        label_names (`list[str]`, *optional*):
            Of TRL or transformers; expected none: columns are found by their names.
        train_sampling_strategy (`str`, *optional*, defaults to `'random'`):
            Of TRL or transformers; expected none or random: rows are drawn in a random order.
        group_by_length (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: rows are drawn in a random order.
        parallelism_config (`str`, *optional*):
            Of TRL or transformers; expected none or false: ranks share the work by rows, and memory by zero_stage.
        fsdp (`None | str | list[str]`, *optional*, defaults to `''`):
            Of TRL or transformers.
        deepspeed (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers.
        deepspeed_config (`str`, *optional*):
            Of TRL or transformers.
        accelerate_config (`str`, *optional*):
            Of TRL or transformers.
        local_rank (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; it has no effect here: ranks are those of the launcher's environment.
        past_index (`int`, *optional*, defaults to `-1`):
            Of TRL or transformers; expected none or -1: outputs of earlier passes are not kept.
        save_safetensors (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; expected none or true: weights are written as safetensors.
        use_mps_device (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: device selects where to compute.
        dataset_mixture (`str`, *optional*):
            Of TRL or transformers.
        dataset_prompt_column (`str`, *optional*):
            Of TRL or transformers.
        model_init_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: dtype sets the dtype, and the model's folder the rest.
        log_completions (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers.
        use_vllm (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_mode (`str`, *optional*, defaults to `'colocate'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_model_impl (`str`, *optional*, defaults to `'vllm'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_sleep_mode (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_base_url (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_host (`str`, *optional*, defaults to `'0.0.0.0'`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_port (`int`, *optional*, defaults to `8000`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_group_port (`int`, *optional*, defaults to `51216`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.3`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_length (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_tensor_parallel_size (`int`, *optional*, defaults to `1`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_device (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_dtype (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_max_model_len (`int`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        vllm_enable_prefix_caching (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_continuous_batching (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        transformers_continuous_batching_config (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        use_transformers_paged (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        cache_implementation (`str`, *optional*):
            Of TRL or transformers; it has no effect here: generation is rlhf's own.
        token_level_kl (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; expected none or false: the KL is that of a whole response.
        vllm_structured_outputs_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        vllm_guided_decoding_regex (`str`, *optional*):
            Of TRL or transformers; expected none: responses are not constrained.
        generation_kwargs (`dict[str, Any] | str`, *optional*):
            Of TRL or transformers; expected none: sampling has its own flags: top_k, top_p, min_p, repetition_penalty,
            min_new_tokens, stop_strings.
        disable_dropout (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: no model's own dropout is applied.
        pad_to_multiple_of (`int`, *optional*):
            Of TRL or transformers; it has no effect here: it changes memory and speed only.
        num_generations_eval (`int`, *optional*):
            Of TRL or transformers; it has no effect here: an evaluation samples one response to each prompt.
        log_multimodal (`bool`, *optional*, defaults to `True`):
            Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some.
        log_unique_prompts (`bool`, *optional*, defaults to `False`):
            Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some.
        wandb_log_unique_prompts (`bool`, *optional*):
            Of TRL or transformers; it has no effect here: responses are text; sample tables and print_answers show some.
        num_completions_to_print (`int`, *optional*):
            Of TRL or transformers; it has no effect here: print_answers shows a few.
        num_processes (`int`, *optional*):
            Number of ranks on this machine, which the program starts [default: those of the launcher that has started
            this process, else one].
        resume_from_checkpoint (`str`, *optional*):
            For scripts that pass it on to `train()`: `True`, or the folder of a checkpoint.
    """

    _command = 'rloo'
    _names = {'response_length': 'max_completion_length', 'num_ppo_epochs': 'num_iterations', 'ppo_epochs': 'num_iterations', 'init_kl_coef': 'beta', 'kl_coef': 'beta', 'kl_penalty': 'kl_estimator', 'n_samples_per_prompt': 'num_generations', 'filter_groups': 'dynamic_sampling', 'cliprange': 'epsilon', 'cliprange_high': 'epsilon_high', 'dual_clip': 'delta', 'log_with': 'report_to', 'tracker_project_name': 'project', 'push_to_hub_model_id': 'hub_model_id', 'push_to_hub_token': 'hub_token', 'ddp_timeout': 'dist_timeout', 'evaluation_strategy': 'eval_strategy', 'no_cuda': 'use_cpu'}
    _usual = {'save_steps': None}

    beta: float = field(default=0.05, metadata={"help": "Coefficient of the KL penalty per token", "aliases": ["--init_kl_coef", "--kl_coef"]})
    kl_estimator: str = field(default='k1', metadata={"help": "Estimator of the KL from each sampled token; `full` computes it over the whole vocabulary: k1, k3, abs, mse, full", "aliases": ["--kl_penalty"]})
    kl_in_loss: bool = field(default=False, metadata={"help": "Add the KL penalty to the policy's loss, as TRL's GRPOTrainer does, instead of the rewards"})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Multiply the KL of each token in the loss by its probability ratio, which corrects it for the policy that sampled"})
    advantage_estimator: str = field(default='rloo', metadata={"help": "How the responses of a group are compared: `grpo` with their mean, `rloo` each with the others. `rlhf ppo` explains the other estimators, which need no group: gae, rloo, grpo, dr_grpo, reinforce, reinforce_baseline, remax"})
    num_generations: int = field(default=2, metadata={"help": "Responses to each prompt, which make a group. Batch sizes count responses", "aliases": ["--n_samples_per_prompt"]})
    loss_type: str = field(default='grpo', metadata={"help": "The policy's objective, and how the losses of tokens become that of a mini-batch: `bnpo` is the mean over its tokens; `grpo` the mean over responses of the means over their tokens; `luspo` of the sums; `dr_grpo` the sum over all tokens, divided by the responses times `max_completion_length`; `dapo` by the tokens of the whole update. `cispo`, `sapo` and `vespo` have objectives of their own: bnpo, grpo, dr_grpo, dapo, cispo, sapo, luspo, vespo"})
    importance_sampling_level: str = field(default='sequence_product', metadata={"help": "Unit of the probability ratio: each token; the `sequence`, as the geometric mean of its tokens' ratios (GSPO); or their product, the ratio of the whole response: token, sequence, sequence_product"})
    token_level_kl: bool = field(default=False, metadata={"help": "Of TRL or transformers; expected none or false: the KL is that of a whole response"})
