"""Flags that users of other engines for this model know, and what does their work here.

Names are written with underscores. Source: reference-engine.md, section 1.4, and reports.md.
"""

_PEER = "a second device holds experts here, --peer_device=N names it"
_DEVICE = (
    "CUDA_VISIBLE_DEVICES chooses and orders devices: the first is the primary, --peer_device=N names "
    "a second one"
)
_CACHE = "--expert_cache=N|auto sizes the expert cache, over all layers"
_RESIDENT = "--resident_budget_gib=N bounds the experts kept in RAM"
_MODEL = "--model=FILE is all that is needed"
_TABLE = "--ple_io=direct|mmap|ram chooses how the n-gram table is read"
_MEMORY = "--device_memory_mib=N bounds the device's memory"

INSTEAD = {
    "layer_split": _PEER,
    "split_device": _PEER,
    "split_skip_if_fits": _PEER,
    "pipeline_windows": _PEER,
    "head_device": _PEER,
    "trim_stage_weights": _PEER,
    "tensor_split": _PEER,
    "split_mode": _PEER,
    "tensor_parallel": _PEER,
    "tensor_parallel_size": _PEER,
    "pipeline_parallel_size": _PEER,
    "gpus": _PEER,
    "num_gpus": _PEER,
    "gpu_mode": _PEER,
    "gpu_order": _DEVICE,
    "gpu": _DEVICE,
    "main_gpu": _DEVICE,
    "device": _DEVICE,
    "devices": _DEVICE,
    "device_map": _DEVICE,
    "cuda_device": _DEVICE,
    "expert_cache_device1": _PEER,
    "expert_cache_device2": _PEER,
    "expert_cache_device3": _PEER,
    "expert_cache_remote_placement": _PEER,
    "remote_expert_opt": _PEER,
    "expert_cache_per_layer": _CACHE,
    "n_cpu_moe": _CACHE,
    "cpu_moe": _CACHE,
    "n_gpu_layers": _CACHE,
    "gpu_layers": _CACHE,
    "mmap_experts": _RESIDENT,
    "resident_experts": _RESIDENT,
    "resident_cpu_experts": _RESIDENT,
    "shared_expert_arena": _RESIDENT,
    "pack": _MODEL,
    "native": _MODEL,
    "native_dense_gguf": _MODEL,
    "native_head_gguf": _MODEL,
    "embd_gguf": _MODEL,
    "ple_gguf": _MODEL,
    "ple_row_cache": _TABLE,
    "ple_inflight": _TABLE,
    "hbm_limit_mib": _MEMORY,
    "vram_limit_mib": _MEMORY,
    "gpu_memory_utilization": _MEMORY,
    "vram_elastic": _MEMORY,
    "pcie_mode": "--pcie_frac=F|auto chooses how much goes over PCIe",
    "adapt_async": "experts move beside the step anyway, --adapt_swaps=N bounds how many",
    "pool_affinity": "--pool_workers=N or --threads=N bounds the threads",
    "no_host_worker": "--pool_workers=N or --threads=N bounds the threads",
    "dump_logits": "--logits_out=FILE of generate writes logits",
}
"""What to use, by the name of the flag that is not supported."""
