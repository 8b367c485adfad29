"""Environment that a stage's process must have before its Python starts."""

# glibc gives freed memory back to the kernel and faults it in again at every step of a training loop.
# Keeping it costs memory, saves time, and changes no bit of the weights.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}

# OpenMP's threads spin at every barrier by default. When anything else wants a core, the spinning thread
# keeps the working one off it, and a step can take ten times as long. Sleeping costs a little. The user's own wins.
THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}

LIBRARIES = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "warning",
}

WORKER_ENVIRONMENT = {**MALLOC, **THREADS}
STAGE_ENVIRONMENT = {**WORKER_ENVIRONMENT, **LIBRARIES}
