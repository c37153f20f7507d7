// Kernels of cllm's own in ggml's list, for what runs on the CPU.
//
// ggml asks each of its extra buffer types for every operation; one without buffers is appended to them. Its virtual
// classes are those of the library that this was compiled for.
#include "kernels.hpp"

#include <algorithm>

namespace {

struct Kernels : ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; } // nothing lies in it
    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        return op->op == GGML_OP_FLASH_ATTN_EXT ? find_attention(op) : find_product(op);
    }
};

} // namespace

// Use them from the next graph on, or no more. Is attention among them?
extern "C" bool cllm_use_kernels(bool wanted) {
    static Kernels                  kernels;
    static ggml_backend_buffer_type type = { {}, nullptr, &kernels };
    // The list of those that weights may lie in is made when it is first asked for: without this one.
    auto * const ask = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_cpu_reg(), "ggml_backend_dev_get_extra_bufts");
    if (!ask || !ask(ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0))) {
        return false;
    }
    auto & types = ggml_backend_cpu_get_extra_buffer_types();
    types.erase(std::remove(types.begin(), types.end(), &type), types.end());
    if (wanted) {
        types.push_back(&type);
    }
#ifdef LANES
    return wanted;
#else
    return false;
#endif
}
