// What llama.cpp keeps and no function of its own returns: the table of the tokens' rows, and the state of a context.
//
// A change of the set of LoRA adapters needs no plan of the largest graphs: llama_set_adapters_lora marks the context, and its next decode plans its two largest graphs and allocates new
// buffers for them: 10 ms on two cores with a 135M model (`python -m bench.adapters --switches`). Only the first decode
// after an adapter was loaded needs that, since only then a graph may have more nodes than there is room for.
// Buffers grow by themselves where a graph of another set is larger.
//
// The members are private, and a template may name them where it is instantiated explicitly.
#include "llama-adapter.h"
#include "llama-context.h"
#include "llama-model.h"

// The tensor that the tokens of a batch are looked up in, or null; its type, and the bytes of a row.
extern "C" const ggml_tensor * cllm_token_table(const llama_model * model, int32_t * type, uint64_t * row) {
    if (model->tok_embd) {
        *type = model->tok_embd->type;
        *row  = model->tok_embd->nb[1];
    }
    return model->tok_embd;
}

template <auto Member, class Tag>
struct Reached {
    friend auto & reach(llama_context & context, Tag) { return context.*Member; }
};

struct Planned {};
struct Set {};
struct Graph {};
struct Graphs {};
auto & reach(llama_context &, Planned);
auto & reach(llama_context &, Set);
auto & reach(llama_context &, Graph);
auto & reach(llama_context &, Graphs);
template struct Reached<&llama_context::sched_need_reserve, Planned>;
template struct Reached<&llama_context::loras, Set>;
template struct Reached<&llama_context::gf_res_prev_active, Graph>;
template struct Reached<&llama_context::gf_res_prev, Graphs>;

// Whether the next decode of a context will plan its graphs.
extern "C" bool cllm_plan_due(llama_context * context) { return reach(*context, Planned {}); }

// Called after llama_set_adapters_lora with `count` adapters, where no plan was due before it. Changes nothing
// where the context is not as that function leaves it.
extern "C" void cllm_keep_plan(llama_context * context, size_t count) {
    if (reach(*context, Planned {}) && reach(*context, Set {})->size() == count) {
        reach(*context, Planned {}) = false;
        reach(*context, Graph {}) = nullptr; // the set may lie where an earlier one did: no graph is used again
    }
}

using Kept = std::array<llm_graph_result_ptr, 2>; // what the graphs of steps with and without output are built in

// Build graphs in `kept` from here on, or in new ones, and return those that were in use. A GPU knows a graph that it has
// recorded by the addresses of its nodes: built where it was, it is not recorded again.
extern "C" Kept * cllm_swap_graphs(llama_context * context, Kept * kept) {
    if (!kept) {
        kept = new Kept;
    }
    std::swap(*kept, reach(*context, Graphs {}));
    return kept;
}

extern "C" void cllm_free_graphs(Kept * kept) { delete kept; }
