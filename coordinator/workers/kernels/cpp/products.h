// Vectors of this processor, and the two functions that compute all products of a chain of layers: `combine` adds up shifted rows times a
// weight each (forwards, gradients of inputs, dense layers), `correlate` the products of two images at many shifts (gradients of
// weights).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int MOST_ROWS = REGISTERS / 4, MOST_COLUMNS = 8;  // of the sums that are added up at once
constexpr long NEAR_BYTES = 32768;                           // what stays in the first cache

// How many columns of sums fit into the registers, beside one more row or column of factors and one factor.
constexpr int columns_beside(int rows, bool row_of_factors) {
    int columns = row_of_factors ? (REGISTERS - 1) / (rows + 1) : (REGISTERS - 1) / rows - 1;
    return columns < 1 ? 1 : columns > MOST_COLUMNS ? MOST_COLUMNS : columns;
}

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Numbers __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Vector load(const float* from) { return *(const Unaligned*)from; }
static inline void store(float* to, Vector value) { *(Unaligned*)to = value; }
static inline float total(Vector value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}
static long whole(long floats) { return (floats + LANES - 1) / LANES * LANES; }
// The next start of a vector within `length` floats; the last one overlaps the one before.
static long following(long at, long length) { return at + LANES < length ? std::min(at + LANES, length - LANES) : length; }
static long parts(long all, long most) { return (all + most - 1) / most; }

// out[o][i] = start[o] + sum over k of a[factor[k] + o * a_step] * x[shift[k] + i], for i < length.
struct Sum {
    float* out;
    long out_step, rows, length;
    const float* start;
    const float* a;
    long a_step;
    const float* x;
    const long* factor;
    const long* shift;
    long terms;
};

template <int O, int V>
static void combine_part(const Sum& s, long row, long at) {
    Vector sums[O][V];
#pragma GCC unroll 8
    for (int o = 0; o < O; o++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[o][v] = Vector{} + (s.start ? s.start[row + o] : 0.0f);
    const float *a = s.a + row * s.a_step, *x = s.x + at;
    const long step = s.a_step, terms = s.terms;
    const long *factor = s.factor, *shift = s.shift;
    for (long k = 0; k < terms; k++) {
        const float *weights = a + factor[k], *from = x + shift[k];
        Vector values[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) values[v] = load(from + v * LANES);
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) {
            float weight = weights[o * step];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[o][v] += weight * values[v];
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) {
        float* to = s.out + (row + o) * s.out_step + at;
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            long left = s.length - at - v * LANES;
            if (left >= LANES) store(to + v * LANES, sums[o][v]);
            else for (long i = 0; i < left; i++) to[v * LANES + i] = sums[o][v][i];
        }
    }
}

template <int O, int V>
static void combine_sized(const Sum& s, long row, long at, int o, int v) {
    if constexpr (O > 1) if (o < O) return combine_sized<O - 1, V>(s, row, at, o, v);
    if constexpr (V > 1) if (v < V) return combine_sized<O, V - 1>(s, row, at, o, v);
    if constexpr (V <= columns_beside(O, true)) combine_part<O, V>(s, row, at);
}

static void combine(const Sum& s) {
    long vectors = parts(s.length, LANES);
    long row_parts = parts(s.rows, MOST_ROWS);
    for (long part = 0, row = 0; part < row_parts; part++) {
        int o = (s.rows - row) / (row_parts - part);
        long vector_parts = parts(vectors, columns_beside(o, true));
        for (long number = 0, at = 0; number < vector_parts; number++) {
            int v = (vectors - at) / (vector_parts - number);
            combine_sized<MOST_ROWS, MOST_COLUMNS>(s, row, at * LANES, o, v);
            at += v;
        }
        row += o;
    }
}

// out[o * out_step + to[k]] = sum over r < lines, i < length of g[o * g_step + r * g_line + i] * x[shift[k] + r * x_line + i].
struct Correlation {
    float* out;
    long out_step;
    const long* to;
    const float* g;
    long g_step, g_line, rows;
    const float* x;
    long x_line;
    const long* shift;
    long shifts, lines, length;
};

template <int O, int T>
static void correlate_part(const Correlation& c, long row, long first, long line, long end, Vector* to) {
    Vector sums[O][T];
#pragma GCC unroll 8
    for (int o = 0; o < O; o++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[o][t] = line ? to[o * c.shifts + t] : Vector{};
    for (; line < end; line++) {
        const float* g = c.g + row * c.g_step + line * c.g_line;
        const float* x[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) x[t] = c.x + c.shift[first + t] + line * c.x_line;
        for (long i = 0; i < c.length; i += LANES) {
            Vector values[O];
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) values[o] = load(g + o * c.g_step + i);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                Vector other = load(x[t] + i);
#pragma GCC unroll 8
                for (int o = 0; o < O; o++) sums[o][t] += values[o] * other;
            }
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < O; o++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) to[o * c.shifts + t] = sums[o][t];
}

template <int O, int T>
static void correlate_sized(const Correlation& c, long row, long first, long line, long end, Vector* to, int o, int t) {
    if constexpr (O > 1) if (o < O) return correlate_sized<O - 1, T>(c, row, first, line, end, to, o, t);
    if constexpr (T > 1) if (t < T) return correlate_sized<O, T - 1>(c, row, first, line, end, to, o, t);
    if constexpr (T <= columns_beside(O, false)) correlate_part<O, T>(c, row, first, line, end, to);
}

static void correlate(const Correlation& c, std::vector<Vector>& sums) {
    sums.resize(c.rows * c.shifts);
    constexpr long most_rows = MOST_ROWS * 3 / 4;
    long row_parts = parts(c.rows, most_rows);
    // Some lines at a time, which all shifts find in the first cache.
    long lines = std::max(1L, NEAR_BYTES / (4 * c.length * c.rows));
    for (long line = 0; line < c.lines; line += lines)
        for (long part = 0, row = 0; part < row_parts; part++) {
            int o = (c.rows - row) / (row_parts - part);
            long shift_parts = parts(c.shifts, columns_beside(o, false));
            for (long number = 0, first = 0; number < shift_parts; number++) {
                int t = (c.shifts - first) / (shift_parts - number);
                Vector* to = sums.data() + row * c.shifts + first;
                correlate_sized<most_rows, MOST_COLUMNS>(c, row, first, line, std::min(line + lines, c.lines), to, o, t);
                first += t;
            }
            row += o;
        }
    for (long row = 0; row < c.rows; row++)
        for (long k = 0; k < c.shifts; k++) c.out[row * c.out_step + c.to[k]] = total(sums[row * c.shifts + k]);
}

// To 2 units in the last place. Cephes (Moshier): x = n ln 2 + r, and a polynomial in r.
static Vector exponential(Vector x) {
    x = x < -87.0f ? Vector{} - 87.0f : x;
    x = x > 88.0f ? Vector{} + 88.0f : x;
    Numbers n = __builtin_convertvector(x * 1.44269504f + (x < 0 ? Vector{} - 0.5f : Vector{} + 0.5f), Numbers);
    Vector whole = __builtin_convertvector(n, Vector);
    Vector r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1;
    Numbers power = (n + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &power, sizeof scale);
    return y * scale;
}
