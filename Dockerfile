# vLLM with the plugin of this library and a pack of compiled kernels, so that a server compiles none of them.
#
#   docker build --tag vllm-flash-delta .
#   docker run --gpus all -p 8000:8000 vllm-flash-delta Qwen/Qwen3-Next-80B-A3B-Instruct --tensor-parallel-size 4
#
# MODEL, TP and TARGET are those of `flash-delta pack`. For a Qwen3.5 on two B200:
#
#   docker build --build-arg MODEL=Qwen3.5 --build-arg TP=2 --build-arg TARGET=sm_100 --tag vllm-flash-delta .
#
# Nobody has built this file yet. vLLM 0.26 is the version in which the plugin has run on GPUs. docs/guide/engines.md has more.
ARG VLLM=0.26.0
FROM vllm/vllm-openai:v${VLLM}
ARG MODEL=Qwen3-Next
ARG TP=4
ARG TARGET=sm_90a

COPY pyproject.toml README.md LICENSE /opt/flash-delta/
COPY flash_delta /opt/flash-delta/flash_delta

# The image has torch, Triton, transformers, typer and a C compiler. Its torch must stay, so nothing else is installed.
RUN pip install --no-cache-dir --no-deps /opt/flash-delta

# It needs no GPU. The pack is for the image's Triton and for these sources.
RUN flash-delta pack --model ${MODEL} --tp ${TP} --target ${TARGET} --out /opt/packs
ENV FLASH_DELTA_KERNELS=/opt/packs
