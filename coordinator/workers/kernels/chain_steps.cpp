// Local training of a chain of convolutions, pooling and dense layers, on one thread.
//
// Images lie with the batch innermost, [channels][height][width * batch]: a step of one column is then a step of `batch`
// floats, so whole rows are vectors without gaps, however few channels there are. All products are done by two functions:
// `combine` adds up shifted rows times a weight each (forwards, gradients of inputs, dense layers), `correlate` the products
// of two images at many shifts (gradients of weights). Rows end in zeros up to a whole vector, and stay so.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
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

enum Activation { NONE, RELU, TANH, SIGMOID };

static void activate(Activation kind, const float* from, float* to, long length) {
    if (kind == RELU)
        for (long i = 0; i < length; i++) to[i] = from[i] <= 0 ? 0 : from[i];  // NaN stays
    if (kind == TANH)
        for (long i = 0; i < length; i++) to[i] = std::tanh(from[i]);
    if (kind == SIGMOID)
        for (long i = 0; i < length; i++) to[i] = 1 / (1 + std::exp(-from[i]));
}

// The gradient by what was activated, given that by the `value` it became.
static void differentiate_activation(Activation kind, const float* value, const float* from, float* to, long length) {
    if (kind == RELU)
        for (long i = 0; i < length; i++) to[i] = value[i] <= 0 ? 0 : from[i];
    if (kind == TANH)
        for (long i = 0; i < length; i++) to[i] = from[i] * (1 - value[i] * value[i]);
    if (kind == SIGMOID)
        for (long i = 0; i < length; i++) to[i] = from[i] * value[i] * (1 - value[i]);
}

// Images of a batch: value(c, y)[x * batch + b]. Before and after each row there are `margin` zeros.
struct Images {
    long channels = 0, height = 0, width = 0, batch = 0, margin = 0, row = 0, plane = 0;
    std::vector<float> values;

    void shape(long channels_, long height_, long width_, long batch_, long margin_ = 0) {
        channels = channels_, height = height_, width = width_, batch = batch_, margin = margin_;
        row = whole(width * batch + 2 * margin);
        plane = row * height;
        values.assign(margin + channels * plane + margin + 8 * LANES * MOST_COLUMNS, 0.0f);
    }
    float* at(long channel, long y) { return values.data() + margin + channel * plane + y * row; }
    long length() const { return width * batch; }
};

struct Layer {
    virtual ~Layer() = default;
    virtual void resize(long batch) = 0;
    virtual void forward(const float* const*& weights) = 0;
    // Weights and gradients are taken from the end of their lists.
    virtual void backward(const float* const*& weights, float* const*& gradients, bool further) = 0;
};

struct Spatial : Layer {
    Images *in, *in_gradient;
    Images out, out_gradient;
    long channels, height, width, margin_columns = 0;
    void resize(long batch) override {
        out.shape(channels, height, width, batch);
        out_gradient.shape(channels, height, width, batch, margin_columns * batch);
    }
};

struct Convolution : Spatial {
    long kernel_y, kernel_x, stride, padding;
    bool copied;
    long phase_width = 0, batch = 0;
    Images own, own_gradient;  // the input with padding, the columns of a row sorted by their number modulo the stride
    std::vector<long> shift, factor;  // of the output, by (input channel, y, x) of the kernel
    struct Reach { long y, phase, first, terms; };  // what reaches a row of the input's gradient, in the lists below
    std::vector<Reach> reaches;
    std::vector<long> back_factor, back_shift;
    std::vector<Vector> sums;

    void resize(long batch_) override {
        margin_columns = kernel_x - 1;
        batch = batch_;
        Spatial::resize(batch);
        copied = stride > 1 || padding > 0;
        if (copied) {
            phase_width = parts(in->width + 2 * padding, stride);
            long tall = in->height + 2 * padding;
            own.shape(in->channels, tall, phase_width * stride, batch);
            own_gradient.shape(in->channels, tall, phase_width * stride, batch);
        }
        shift.clear(), factor.clear(), reaches.clear();
        Images& source = copied ? own : *in;
        for (long c = 0; c < in->channels; c++)
            for (long y = 0; y < kernel_y; y++)
                for (long x = 0; x < kernel_x; x++) {
                    shift.push_back(c * source.plane + y * source.row + column(x) * batch);
                    factor.push_back((c * kernel_y + y) * kernel_x + x);
                }
    }
    long column(long x) const { return copied ? x % stride * phase_width + x / stride : x; }
    void arrange() {
        for (long c = 0; c < in->channels; c++)
            for (long y = 0; y < in->height; y++)
                for (long x = 0; x < in->width; x++)
                    std::memcpy(own.at(c, y + padding) + column(x + padding) * batch, in->at(c, y) + x * batch, 4 * batch);
    }
    void forward(const float* const*& weights) override {
        if (copied) arrange();
        const float *weight = *weights++, *bias = *weights++;
        Images& source = copied ? own : *in;
        long terms = shift.size();
        for (long y = 0; y < height; y++)
            combine({out.at(0, y), out.plane, channels, out.length(), bias, weight, terms, source.at(0, y * stride),
                     factor.data(), shift.data(), terms});
    }
    void backward(const float* const*& weights, float* const*& gradients, bool further) override {
        --weights;
        const float* weight = *--weights;
        float *to_bias = *--gradients, *to_weight = *--gradients;
        Images& source = copied ? own : *in;
        Images& g = out_gradient;
        for (long c = 0; to_bias && c < channels; c++) {
            Vector sum = {};
            for (long y = 0; y < height; y++)
                for (long i = 0; i < g.length(); i += LANES) sum += load(g.at(c, y) + i);
            to_bias[c] = total(sum);
        }
        long terms = shift.size();
        correlate({to_weight, terms, factor.data(), g.at(0, 0), g.plane, g.row, channels, source.at(0, 0),
                   stride * source.row, shift.data(), terms, height, g.length()},
                  sums);
        if (further) to_input(weight);
    }
    void find_reaches() {
        reaches.clear(), back_factor.clear(), back_shift.clear();
        long area = kernel_y * kernel_x, tall = copied ? own_gradient.height : in->height;
        const Images& g = out_gradient;
        for (long y = 0; y < tall; y++)
            for (long phase = 0; phase < stride; phase++) {
                long first = back_factor.size();
                for (long ky = y % stride; ky < kernel_y && ky <= y; ky += stride) {
                    long from = (y - ky) / stride;
                    if (from >= height) continue;
                    for (long o = 0; o < channels; o++)
                        for (long kx = phase; kx < kernel_x; kx += stride) {
                            back_factor.push_back(o * in->channels * area + ky * kernel_x + kx);
                            back_shift.push_back(o * g.plane + from * g.row - kx / stride * batch);
                        }
                }
                reaches.push_back({y, phase, first, (long)back_factor.size() - first});
            }
    }
    void to_input(const float* weight) {
        if (reaches.empty()) find_reaches();
        Images& target = copied ? own_gradient : *in_gradient;
        long columns = copied ? phase_width : target.width;
        for (const Reach& reach : reaches)
            combine({target.at(0, reach.y) + reach.phase * columns * batch, target.plane, in->channels, columns * batch, nullptr,
                     weight, kernel_y * kernel_x, out_gradient.at(0, 0), back_factor.data() + reach.first,
                     back_shift.data() + reach.first, reach.terms});
        if (!copied) return;
        for (long c = 0; c < in->channels; c++)
            for (long y = 0; y < in->height; y++)
                for (long x = 0; x < in->width; x++)
                    std::memcpy(in_gradient->at(c, y) + x * batch, own_gradient.at(c, y + padding) + column(x + padding) * batch,
                                4 * batch);
    }
};

struct Activated : Spatial {
    Activation kind;
    void forward(const float* const*&) override {
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++) activate(kind, in->at(c, y), out.at(c, y), out.length());
    }
    void backward(const float* const*&, float* const*&, bool) override {
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++)
                differentiate_activation(kind, out.at(c, y), out_gradient.at(c, y), in_gradient->at(c, y), out.length());
    }
};

struct MaxPooling : Spatial {
    long size_y, size_x;
    std::vector<int32_t> chosen;  // which place of its window each output is from
    void resize(long batch) override {
        Spatial::resize(batch);
        chosen.assign(channels * height * width * batch, 0);
    }
    const float* window(const Images& images, long c, long y, long x) const {
        return images.values.data() + images.margin + c * images.plane + y * size_y * images.row + x * size_x * images.batch;
    }
    long place(const Images& images, long k) const { return k / size_x * images.row + k % size_x * images.batch; }
    void forward(const float* const*&) override {
        long batch = out.batch, places = size_y * size_x;
        int32_t* number = chosen.data();
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++)
                for (long x = 0; x < width; x++, number += batch) {
                    const float* from = window(*in, c, y, x);
                    float* to = out.at(c, y) + x * batch;
                    for (long b = 0; b + LANES <= batch; b = following(b, batch)) {
                        Vector most = load(from + b);
                        Numbers at = {};
                        for (long k = 1; k < places; k++) {
                            Vector value = load(from + place(*in, k) + b);
                            Numbers more = ~(value <= most);  // NaN is more
                            at = more ? Numbers{} + (int32_t)k : at;
                            most = more ? value : most;
                        }
                        store(to + b, most);
                        std::memcpy(number + b, &at, sizeof at);
                    }
                    for (long b = 0; batch < LANES && b < batch; b++) {
                        to[b] = from[b], number[b] = 0;
                        for (long k = 1; k < places; k++)
                            if (float value = from[place(*in, k) + b]; !(value <= to[b])) to[b] = value, number[b] = k;
                    }
                }
    }
    void backward(const float* const*&, float* const*&, bool) override {
        long batch = out.batch, places = size_y * size_x;
        const int32_t* number = chosen.data();
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++)
                for (long x = 0; x < width; x++, number += batch) {
                    const float* from = out_gradient.at(c, y) + x * batch;
                    float* to = const_cast<float*>(window(*in_gradient, c, y, x));
                    for (long b = 0; b + LANES <= batch; b = following(b, batch)) {
                        Vector value = load(from + b);
                        Numbers at;
                        std::memcpy(&at, number + b, sizeof at);
                        for (long k = 0; k < places; k++)
                            store(to + place(*in_gradient, k) + b, at == (int32_t)k ? value : Vector{});
                    }
                    for (long b = 0; batch < LANES && b < batch; b++)
                        for (long k = 0; k < places; k++) to[place(*in_gradient, k) + b] = number[b] == k ? from[b] : 0;
                }
    }
};

// Features of a batch: values[feature * step + b].
struct Features {
    long count = 0, step = 0;
    std::vector<float> values;
    void shape(long count_, long batch) {
        count = count_, step = whole(batch);
        values.assign(count * step + LANES * MOST_COLUMNS, 0.0f);
    }
};

struct Dense : Layer {
    Features *in, *in_gradient, out, out_gradient;
    long outputs, batch = 0;
    Activation activation = NONE;
    std::vector<long> factor, shift, back_factor, back_shift, batch_factor, batch_shift;
    std::vector<float> turned;  // the input [batch][features]; the first layer finds it here
    bool is_first = false;
    void resize(long batch_) override {
        batch = batch_;
        out.shape(outputs, batch), out_gradient.shape(outputs, batch);
        long inputs = in->count;
        turned.assign(batch * inputs + LANES * MOST_COLUMNS, 0.0f);
        fill(factor, inputs, 1), fill(shift, inputs, in->step);
        fill(back_factor, outputs, inputs), fill(back_shift, outputs, out.step);
        fill(batch_factor, batch, 1), fill(batch_shift, batch, inputs);
    }
    static void fill(std::vector<long>& numbers, long count, long step) {
        numbers.resize(count);
        for (long i = 0; i < count; i++) numbers[i] = i * step;
    }
    void forward(const float* const*& weights) override {
        const float *weight = *weights++, *bias = *weights++;
        long inputs = in->count;
        combine({out.values.data(), out.step, outputs, batch, bias, weight, inputs, in->values.data(), factor.data(),
                 shift.data(), inputs});
        for (long o = 0; activation && o < outputs; o++) {
            float* row = out.values.data() + o * out.step;
            activate(activation, row, row, batch);
        }
    }
    void backward(const float* const*& weights, float* const*& gradients, bool further) override {
        --weights;
        const float* weight = *--weights;
        float *to_bias = *--gradients, *to_weight = *--gradients;
        long inputs = in->count, step = out.step;
        float* g = out_gradient.values.data();
        for (long o = 0; activation && o < outputs; o++)
            differentiate_activation(activation, out.values.data() + o * step, g + o * step, g + o * step, batch);
        for (long o = 0; to_bias && o < outputs; o++) {
            Vector sum = {};
            for (long i = 0; i < step; i += LANES) sum += load(g + o * step + i);
            to_bias[o] = total(sum);
        }
        for (long b = 0; !is_first && b < batch; b++)
            for (long i = 0; i < inputs; i++) turned[b * inputs + i] = in->values[i * in->step + b];
        combine({to_weight, inputs, outputs, inputs, nullptr, g, step, turned.data(), batch_factor.data(), batch_shift.data(),
                 batch});
        if (further)
            combine({in_gradient->values.data(), in_gradient->step, inputs, batch, nullptr, weight, 1, g, back_factor.data(),
                     back_shift.data(), outputs});
    }
};

struct Flattening : Layer {
    Images *in, *in_gradient;
    Features out, out_gradient;
    long batch = 0;
    void resize(long batch_) override {
        batch = batch_;
        long count = in->channels * in->height * in->width;
        out.shape(count, batch), out_gradient.shape(count, batch);
    }
    template <bool BACK>
    void copy() {
        Images& images = BACK ? *in_gradient : *in;
        float* flat = (BACK ? out_gradient : out).values.data();
        for (long c = 0; c < in->channels; c++)
            for (long y = 0; y < in->height; y++)
                for (long x = 0; x < in->width; x++, flat += out.step) {
                    float* image = images.at(c, y) + x * batch;
                    std::memcpy(BACK ? image : flat, BACK ? flat : image, 4 * batch);
                }
    }
    void forward(const float* const*&) override { copy<false>(); }
    void backward(const float* const*&, float* const*&, bool) override { copy<true>(); }
};

struct Chain {
    long channels, height, width, batch = 0;
    bool channels_last, regression;
    Images input, unused;
    Features flat_input, flat_unused;
    std::vector<std::unique_ptr<Layer>> layers;
    Dense* first_dense = nullptr;  // if the rows of the data are its input
    size_t first_weights = 0;      // the first layer that has weights
    long slots = 0;                // for weights: two for each layer that has them
    Features *outputs = nullptr, *to_outputs = nullptr;

    Chain(const int64_t* numbers, int64_t count, const int64_t* shape, bool channels_last_, bool regression_)
        : channels(shape[0]), height(shape[1]), width(shape[2]), channels_last(channels_last_), regression(regression_) {
        Images *at = &input, *gradient = &unused;
        Features *flat = &flat_input, *flat_gradient = &flat_unused;
        long c = channels, h = height, w = width;
        for (int64_t i = 0; i < count; i++, numbers += 6) {
            auto spatial = [&](auto made) {
                made->in = at, made->in_gradient = gradient;
                made->channels = c, made->height = h, made->width = w;
                at = &made->out, gradient = &made->out_gradient;
                layers.push_back(std::move(made));
            };
            if (numbers[0] == CONVOLUTION) {
                auto made = std::make_unique<Convolution>();
                made->kernel_y = numbers[2], made->kernel_x = numbers[3], made->stride = numbers[4], made->padding = numbers[5];
                c = numbers[1];
                h = (h + 2 * made->padding - made->kernel_y) / made->stride + 1;
                w = (w + 2 * made->padding - made->kernel_x) / made->stride + 1;
                weigh();
                spatial(std::move(made));
            } else if (numbers[0] == ACTIVATION) {
                auto made = std::make_unique<Activated>();
                made->kind = Activation(numbers[1]);
                spatial(std::move(made));
            } else if (numbers[0] == MAX_POOLING) {
                auto made = std::make_unique<MaxPooling>();
                made->size_y = numbers[2], made->size_x = numbers[3];
                h /= made->size_y, w /= made->size_x;
                spatial(std::move(made));
            } else if (numbers[0] == FLATTENING) {
                auto made = std::make_unique<Flattening>();
                made->in = at, made->in_gradient = gradient;
                flat = &made->out, flat_gradient = &made->out_gradient;
                layers.push_back(std::move(made));
            } else {
                auto made = std::make_unique<Dense>();
                made->in = flat, made->in_gradient = flat_gradient;
                made->outputs = numbers[1], made->activation = Activation(numbers[2]);
                flat = &made->out, flat_gradient = &made->out_gradient;
                if (layers.empty()) first_dense = made.get(), made->is_first = true;
                weigh();
                layers.push_back(std::move(made));
            }
        }
        outputs = flat, to_outputs = flat_gradient;
    }
    enum { CONVOLUTION, ACTIVATION, MAX_POOLING, FLATTENING, DENSE };
    void weigh() {
        if (!slots) first_weights = layers.size();
        slots += 2;
    }
    long features() const { return channels * height * width; }
    void resize(long batch_) {
        if (batch_ == batch) return;
        batch = batch_;
        if (first_dense) {
            flat_input.shape(features(), batch);
        } else {
            input.shape(channels, height, width, batch);
            unused.shape(channels, height, width, batch);
        }
        for (auto& layer : layers) layer->resize(batch);
    }
    void turn(const float* const* rows) {
        const long all = features(), step = flat_input.step, part = 16;
        float* to = flat_input.values.data();
        for (long first = 0; first < all; first += part)
            for (long b = 0; b < batch; b++)
                for (long i = first; i < std::min(first + part, all); i++) to[i * step + b] = rows[b][i];
    }
    void read(const float* const* rows) {
        long area = height * width, all = features();
        if (first_dense) {
            for (long b = 0; b < batch; b++) std::memcpy(first_dense->turned.data() + b * all, rows[b], 4 * all);
            turn(rows);
            return;
        }
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++) {
                float* to = input.at(c, y);
                long first = channels_last ? y * width * channels + c : c * area + y * width, step = channels_last ? channels : 1;
                for (long b = 0; b < batch; b++) {
                    const float* from = rows[b] + first;
                    for (long i = 0; i < width; i++) to[i * batch + b] = from[i * step];
                }
            }
    }
    // Mean cross-entropy over the labels that are classes, and its gradient by the logits.
    double classify(const int32_t* y) {
        long classes = outputs->count, step = outputs->step, counted = 0;
        for (long b = 0; b < batch; b++) counted += y[b] >= 0 && y[b] < classes;
        double loss = 0;
        for (long first = 0; first < batch; first += LANES) {
            const float* z = outputs->values.data() + first;
            float* g = to_outputs->values.data() + first;
            Vector most = load(z), sum = {};
            for (long c = 1; c < classes; c++) {
                Vector value = load(z + c * step);
                most = value <= most ? most : value;  // NaN stays
            }
            for (long c = 0; c < classes; c++) {
                Vector share = exponential(load(z + c * step) - most);
                sum += share;
                store(g + c * step, share);
            }
            Vector factor;
            long end = std::min<long>(LANES, batch - first);
            for (long lane = 0; lane < LANES; lane++) {
                long label = lane < end ? y[first + lane] : -1;
                bool counts = label >= 0 && label < classes;
                factor[lane] = counts ? 1 / (sum[lane] * counted) : 0;
                if (counts) loss += std::log(sum[lane]) + most[lane] - z[label * step + lane];
            }
            for (long c = 0; c < classes; c++) store(g + c * step, load(g + c * step) * factor);
            for (long lane = 0; lane < end; lane++)
                if (long label = y[first + lane]; factor[lane] != 0 && label >= 0 && label < classes) g[label * step + lane] -= 1.0f / counted;
        }
        return loss / counted;  // NaN if none is counted
    }
    // Mean squared error over the quantities that are not padding, and its gradient by the output.
    double regress(const float* y, float least) {
        long counted = 0;
        for (long b = 0; b < batch; b++) counted += y[b] > least;
        double loss = 0;
        for (long b = 0; b < batch; b++) {
            float error = y[b] > least ? outputs->values[b] - y[b] : 0;
            loss += (double)error * error;
            to_outputs->values[b] = 2 * error / counted;
        }
        return loss / counted;
    }
    // The loss of a batch; writes the gradients. Labels are int32, quantities float32.
    double differentiate(const float* const* rows, const void* y, float least, const float* const* weights, float* const* gradients) {
        read(rows);
        for (auto& layer : layers) layer->forward(weights);
        double loss = regression ? regress((const float*)y, least) : classify((const int32_t*)y);
        gradients += slots;
        for (size_t i = layers.size(); i-- > first_weights;) layers[i]->backward(weights, gradients, i > first_weights);
        return loss;
    }
};

// Buffers for full batches and for others, which have several sizes.
struct Chains {
    Chain full, other;
    std::vector<const float*> rows;
    std::vector<float> memory;
    Chain& of(long batch) {
        Chain& chosen = full.batch == 0 || full.batch == batch ? full : other;
        chosen.resize(batch);
        rows.resize(batch);
        return chosen;
    }
};

extern "C" {
// numbers: six for each layer, its kind first. shape: channels, height and width of an image, or 1, 1 and the features.
void* create(const int64_t* numbers, int64_t count, const int64_t* shape, int32_t channels_last, int32_t regression) {
    return new Chains{{numbers, count, shape, (bool)channels_last, (bool)regression},
                      {numbers, count, shape, (bool)channels_last, (bool)regression}, {}, {}};
}

void destroy(void* chains) { delete static_cast<Chains*>(chains); }

// The loss of a batch x [batch][features], y [batch], and its gradient by each weight. A missing bias is a null pointer.
double differentiate(void* chains, const float* x, const void* y, int64_t batch, float least, const float* const* weights,
                     float* const* gradients) {
    Chains& all = *static_cast<Chains*>(chains);
    Chain& chain = all.of(batch);
    for (long b = 0; b < batch; b++) all.rows[b] = x + b * chain.features();
    return chain.differentiate(all.rows.data(), y, least, weights, gradients);
}

// What clients train on. Slots are clients in the order of `rows` and `sizes`; `order` says which client each is.
struct Work {
    const float* x;         // all rows of the data
    const void* y;
    const int64_t* rows;    // [steps][slots][width]
    const int64_t* sizes;   // [steps][slots]; 0: the client is done
    const int64_t* order;   // [slots]
    int64_t steps, slots, width;
    const int64_t* counts;  // of the values of each weight
    double lr, mu, momentum, clip_grad_norm, clip_epsilon;
    float least;            // quantities up to this are padding
};

// Trains each client from `start`. deltas[weight][client]: trained minus start; losses[slot]: mean over its examples.
// offsets[weight][client]: added to gradients, or null.
void train(void* chains, const Work* of, const float* const* start, const float* const* offsets, float* const* deltas, double* losses) {
    Chains& all = *static_cast<Chains*>(chains);
    const Work& work = *of;
    long slots = all.full.slots, values = 0;
    std::vector<long> begins(slots);
    for (long i = 0; i < slots; i++) begins[i] = values, values += work.counts[i];
    bool moving = work.momentum != 0;
    all.memory.resize((moving ? 2 : 1) * values);
    std::vector<float*> weights(slots), gradients(slots);
    for (long i = 0; i < slots; i++) gradients[i] = work.counts[i] ? all.memory.data() + begins[i] : nullptr;
    float* velocity = all.memory.data() + values;
    std::vector<int32_t> labels(work.width);
    for (int64_t slot = 0; slot < work.slots; slot++) {
        int64_t client = work.order[slot];
        for (long i = 0; i < slots; i++) {
            weights[i] = work.counts[i] ? deltas[i] + client * work.counts[i] : nullptr;
            if (work.counts[i]) std::memcpy(weights[i], start[i], 4 * work.counts[i]);
        }
        if (moving) std::fill(velocity, velocity + values, 0.0f);
        double loss = 0, examples = 0;
        for (int64_t step = 0; step < work.steps; step++) {
            int64_t size = work.sizes[step * work.slots + slot];
            if (!size) break;
            Chain& chain = all.of(size);
            const int64_t* rows = work.rows + (step * work.slots + slot) * work.width;
            for (long b = 0; b < size; b++) {
                all.rows[b] = work.x + rows[b] * chain.features();
                std::memcpy(&labels[b], (const int32_t*)work.y + rows[b], 4);
            }
            loss += size * chain.differentiate(all.rows.data(), labels.data(), work.least, weights.data(), gradients.data());
            examples += size;
            double squares = 0;
            for (long i = 0; i < slots; i++) {
                float* g = gradients[i];
                const float* offset = offsets[i] && work.counts[i] ? offsets[i] + client * work.counts[i] : nullptr;
                if (offset)
                    for (long k = 0; k < work.counts[i]; k++) g[k] += offset[k];
                if (work.mu)
                    for (long k = 0; k < work.counts[i]; k++) g[k] += (float)work.mu * (weights[i][k] - start[i][k]);
                if (work.clip_grad_norm)
                    for (long k = 0; k < work.counts[i]; k++) squares += (double)g[k] * g[k];
            }
            float factor = 1;
            if (work.clip_grad_norm)
                factor = std::min(1.0, work.clip_grad_norm / (std::sqrt(squares) + work.clip_epsilon));
            float lr = work.lr, momentum = work.momentum;
            for (long i = 0; i < slots; i++) {
                float *g = gradients[i], *w = weights[i], *v = velocity + begins[i];
                if (moving) {
                    for (long k = 0; k < work.counts[i]; k++) v[k] = momentum * v[k] + factor * g[k], w[k] -= lr * v[k];
                } else {
                    for (long k = 0; k < work.counts[i]; k++) w[k] -= lr * (factor * g[k]);
                }
            }
        }
        losses[slot] = loss / examples;
        for (long i = 0; i < slots; i++)
            for (long k = 0; k < work.counts[i]; k++) weights[i][k] -= start[i][k];
    }
}
}
