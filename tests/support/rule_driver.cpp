// Runs generated rules on one row, as a kernel does, with V = float and with V = a vector of four.
// The test writes harness_rules.h: the rules, each in a namespace, and their entry points.

#include <cmath>
#include <cstdint>
#include <cstring>

#define FN inline __attribute__((always_inline))

constexpr int WIDTH = 4;
constexpr int LANES = 16;
constexpr int MOST = 256;  // elements of a row that the test uses, at most
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vec_i32 __attribute__((vector_size(4 * WIDTH)));

FN float root(float x) { return __builtin_sqrtf(x); }
FN float magnitude(float x) { return __builtin_fabsf(x); }
FN float chosen(bool condition, float a, float b) { return condition ? a : b; }
FN vec chosen(vec_i32 condition, vec a, vec b) { return condition ? a : b; }
template <class V>
FN V smaller(V a, V b) { return a < b ? a : b; }
template <class V>
FN V larger(V a, V b) { return a > b ? a : b; }
FN vec root(vec x) {
    for (int lane = 0; lane < WIDTH; ++lane) x[lane] = root(x[lane]);
    return x;
}
FN vec magnitude(vec x) {
    for (int lane = 0; lane < WIDTH; ++lane) x[lane] = magnitude(x[lane]);
    return x;
}

template <class V>
V load(const float* from, int64_t rest) {
    V value{};
    memcpy(&value, from, rest * sizeof(float) < sizeof(V) ? rest * sizeof(float) : sizeof(V));
    return value;
}

template <class V>
void store(float* to, int64_t rest, V value) {
    memcpy(to, &value, rest * sizeof(float) < sizeof(V) ? rest * sizeof(float) : sizeof(V));
}

// One row: g and w have dim numbers, state has dim for each state of elements.
template <class Rule, class V>
struct Row {
    static constexpr int STEP = sizeof(V) / sizeof(float);
    const float* g;
    float* w;
    float* state;
    int dim;

    void states(int at, V* loaded) {
        for (int k = 0; k < Rule::ELEMENT_STATES; ++k) loaded[k] = load<V>(state + k * dim + at, dim - at);
    }

    template <int R>
    void reduce(const typename Rule::Scalars& s, typename Rule::Row& row) {
        if constexpr (R < Rule::REDUCTIONS) {
            float terms[MOST + LANES] = {};
            for (int at = 0; at < dim; at += STEP) {
                V old[Rule::ELEMENT_STATES + 1];
                states(at, old);
                const V term = Rule::template term<R, V>(s, row, load<V>(g + at, dim - at), load<V>(w + at, dim - at), old);
                store<V>(terms + at, dim - at, term);
            }
            float lanes[LANES] = {};
            for (int at = 0; at < dim; ++at) lanes[at % LANES] += terms[at];
            for (int half = LANES / 2; half > 0; half /= 2) {
                for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
            }
            Rule::template close<R>(s, row, lanes[0], dim);
            reduce<R + 1>(s, row);
        }
    }

    void update(const double* hyper, int64_t t, float* row_state) {
        const auto s = Rule::scalars(hyper, t);
        auto row = Rule::open(s, row_state);
        reduce<0>(s, row);
        Rule::finish(s, row, row_state);
        for (int at = 0; at < dim; at += STEP) {
            V elements[Rule::ELEMENT_STATES + 1];
            states(at, elements);
            V weights = load<V>(w + at, dim - at);
            Rule::apply(s, row, load<V>(g + at, dim - at), weights, elements);
            store<V>(w + at, dim - at, weights);
            for (int k = 0; k < Rule::ELEMENT_STATES; ++k) store<V>(state + k * dim + at, dim - at, elements[k]);
        }
    }
};

template <class Rule>
void update_row(int64_t wide, const double* hyper, int64_t t, const float* g, float* w, float* state, float* row_state, int64_t dim) {
    if (wide) {
        Row<Rule, vec>{g, w, state, int(dim)}.update(hyper, t, row_state);
    } else {
        Row<Rule, float>{g, w, state, int(dim)}.update(hyper, t, row_state);
    }
}

#include "harness_rules.h"
