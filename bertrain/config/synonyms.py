"""Words of other programs, and the settings that they mean here."""

from __future__ import annotations

_WORDS = {
    "optimizer.learning_rate": "lr",
    "optimizer.name": "optim optimizer",
    "optimizer.clip_norm": "max_grad_norm grad_clip gradient_clipping",
    "batch.sequences": "batch_size train_batch_size per_device_train_batch_size global_batch_size",
    "batch.token_budget": "micro_batch_size",
    "train.epochs": "num_train_epochs num_epochs",
    "train.max_steps": "steps num_steps",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.kernels": "compile torch_compile flash_attention",
    "schedule.warmup_steps": "warmup",
    "schedule.warmup_share": "warmup_ratio",
    "schedule.decay": "scheduler lr_scheduler lr_scheduler_type",
    "data.max_seq_length": "max_length seq_length sequence_length",
    "data.mask_probability": "mlm_probability",
    "model.hidden_dropout": "dropout",
    "model.num_layers": "layers depth",
    "log.every_steps": "logging_steps log_steps",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "evaluate.data": "eval_data validation_file",
    "evaluate.every_samples": "eval_steps",
    "type --precision fp16": "fp16",
    "type --precision bf16": "bf16",
    "type --run FOLDER": "output_dir output out",
    "type --nproc N": "gpus num_gpus devices nproc_per_node",
    "name a recipe, or weights with --init": "model model_name model_name_or_path",
    "type bertrain resume RUN": "resume resume_from_checkpoint",
    "it is not needed: batch.sequences is the whole step, computed in bins of batch.token_budget tokens": (
        "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches"
    ),
    "it is not needed: batches are made ahead in a thread": "num_workers dataloader_num_workers",
    "metrics go to metrics.jsonl and TensorBoard (log.tensorboard), and `bertrain report RUN` shows them": (
        "wandb mlflow report_to"
    ),
}
SYNONYMS = {word: meaning for meaning, words in _WORDS.items() for word in words.split()}
"""The setting that a word means, or what to do instead."""
