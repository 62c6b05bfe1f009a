"""Device memory of GPUs: the CUDA driver, queues, IPC, kernels, and staging through pinned memory."""
