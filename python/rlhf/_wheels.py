"""The wheels that libtorch is taken from, by the name of the machine, with their SHA-256.

All wheels of torch have the same libtorch whatever their version of Python; those for 3.12 are taken. A package index may have
the build for CUDA, as PyPI does, or that for CPUs (2.11.0+cpu); the second needs none of NVIDIA's.
"""

# Versions of Python of the wheels, for pip and for uv.
PYTHON = "3.12"
NAME = "torch==2.11.0"

TORCH = {
    "x86_64": ("0f68f4ac6d95d12e896c3b7a912b5871619542ec54d3649cf48cc1edd4dd2756",),
    "aarch64": ("f99924682ef0aa6a4ab3b1b76f40dc6e273fca09f367d15a524266db100a723f",),
}
TORCH_CPU = {
    "x86_64": ("f82e2ae20c1545bb03997d1cc3143d94e14b800038669ee1aca45808a9acc338",),
    "aarch64": ("70ecb2659af6373b7c5336e692e665605b0201ea21ff51aaea47e1d75ea6b5aa",),
}
# Libraries that libtorch_cpu.so of the build for CUDA is linked with, at the versions that its metadata pins.
BESIDE = {
    "nvidia-cuda-runtime==13.0.96": {
        "x86_64": ("7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",),
        "aarch64": ("ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",),
    },
    "nvidia-cuda-cupti==13.0.85": {
        "x86_64": ("4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",),
        "aarch64": ("796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151",),
    },
}

# Megabytes of disk that a fetch needs while it unpacks, and what it leaves, by device.
NEEDS = {"cpu": 2000, "cuda": 12000}
SIZES = {
    "cpu": "530 MB to download, 190 MB where the index has builds for CPUs; 460 MB on disk",
    "cuda": "3 GB to download, 3.5 GB on disk",
}
