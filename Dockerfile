# kumi from its wheel in dist/, as an image for Docker, Podman, Kubernetes, pyxis and Apptainer (docs/containers.md):
#   pip wheel --no-deps --wheel-dir dist . && docker build --tag kumi:cuda .
ARG BASE=python:3.11-slim-bookworm
# cuda or cpu
ARG VARIANT=cuda

# The environment is built apart, so that no build file and no setting of pip is in a layer of the image.
FROM ${BASE} AS build
ARG VARIANT
ARG TORCH=2.13.0
# A further package index for torch: PyTorch's own has its builds for CPUs and for each version of CUDA.
ARG TORCH_INDEX
# Extras of kumi, as in pip install kumi[data,s3].
ARG EXTRAS=data,s3
# The wheel of kumi. pip takes other wheels beside it, too, which can replace an index.
COPY dist/ /wheels/
# The secret is a pip.conf, for an index that needs a password. Nothing of it stays in the image. Tests of packages are removed.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    set -e; \
    case "$VARIANT" in cpu) build="+cpu" ;; cuda) build="" ;; *) echo "VARIANT=$VARIANT is neither cpu nor cuda" >&2; exit 1 ;; esac; \
    set -- /wheels/kumi-*.whl; \
    [ $# = 1 ] && [ -f "$1" ] || { echo "dist/ must have one wheel of kumi, and has: $*" >&2; exit 1; }; \
    python3 -m venv --without-pip /opt/kumi; \
    python3 -m pip --python /opt/kumi/bin/python install --no-cache-dir --disable-pip-version-check \
        --root-user-action=ignore --find-links /wheels ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        "torch==$TORCH$build" "$1[$EXTRAS]"; \
    /opt/kumi/bin/python -c 'import sys, torch; sys.exit((torch.version.cuda is None) != (sys.argv[1] == "cpu"))' "$VARIANT" || \
        { echo "torch is not a build for $VARIANT; set TORCH_INDEX to the index of such builds" >&2; exit 1; }; \
    cd /opt/kumi/lib/python3*/site-packages; \
    rm -rf torch/test torch/bin/*[Tt]est* torch/bin/protoc*; \
    find . -type d -name tests -prune -exec rm -rf {} +

FROM ${BASE} AS cpu

FROM ${BASE} AS cuda
# NCCL opens the libraries of InfiniBand and RoCE if they are there; Triton (train.compile) needs a C compiler.
RUN apt-get update && \
    apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 && \
    rm -rf /var/lib/apt/lists/*
# By these the container runtimes of Docker, Kubernetes and enroot give a container the GPUs and the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${VARIANT}
# Any user may run kumi here: both folders are open to all, as /tmp is.
RUN useradd --uid 1000 --user-group --home-dir /home/kumi --no-create-home --shell /bin/bash kumi && \
    install --directory --mode=1777 /home/kumi /work
COPY --from=build /opt/kumi /opt/kumi
ENV PATH=/opt/kumi/bin:$PATH HOME=/home/kumi LANG=C.UTF-8
WORKDIR /work
# By number, without which Kubernetes' runAsNonRoot refuses the image.
USER 1000:1000
# Cheap enough for a machine in training: no torch, no GPU. A run that hangs ends by itself.
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s CMD ["kumi", "--version"]
# No entrypoint: srun, pyxis and Apptainer start shells, and kumi is fit to be process 1.
CMD ["kumi", "--help"]
