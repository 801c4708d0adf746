// Loss and gradient of a batch for a chain of convolutions, pooling and dense layers, on one thread.
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
constexpr int SUMS = REGISTERS - 6;  // what is added up at once; the others hold factors
constexpr int MOST_ROWS = 8, MOST_VECTORS = 6;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline Vector load(const float* from) { return *(const Unaligned*)from; }
static inline void store(float* to, Vector value) { *(Unaligned*)to = value; }
static inline float total(Vector value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}
static long whole(long floats) { return (floats + LANES - 1) / LANES * LANES; }
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
            Vector weight = Vector{} + weights[o * step];
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
    if constexpr (O * V <= SUMS) combine_part<O, V>(s, row, at);
}

static void combine(const Sum& s) {
    long vectors = parts(s.length, LANES);
    long row_parts = parts(s.rows, std::min<long>(MOST_ROWS, SUMS / 2));
    for (long part = 0, row = 0; part < row_parts; part++) {
        int o = (s.rows - row) / (row_parts - part);
        long vector_parts = parts(vectors, std::min(MOST_VECTORS, SUMS / o));
        for (long number = 0, at = 0; number < vector_parts; number++) {
            int v = (vectors - at) / (vector_parts - number);
            combine_sized<MOST_ROWS, MOST_VECTORS>(s, row, at * LANES, o, v);
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
static void correlate_part(const Correlation& c, long row, long first) {
    Vector sums[O][T] = {};
    for (long line = 0; line < c.lines; line++) {
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
        for (int t = 0; t < T; t++) c.out[(row + o) * c.out_step + c.to[first + t]] = total(sums[o][t]);
}

template <int O, int T>
static void correlate_sized(const Correlation& c, long row, long first, int o, int t) {
    if constexpr (O > 1) if (o < O) return correlate_sized<O - 1, T>(c, row, first, o, t);
    if constexpr (T > 1) if (t < T) return correlate_sized<O, T - 1>(c, row, first, o, t);
    if constexpr (O * T <= SUMS) correlate_part<O, T>(c, row, first);
}

static void correlate(const Correlation& c) {
    long row_parts = parts(c.rows, std::min<long>(MOST_ROWS, SUMS / 2));
    for (long part = 0, row = 0; part < row_parts; part++) {
        int o = (c.rows - row) / (row_parts - part);
        long shift_parts = parts(c.shifts, std::min(MOST_VECTORS, SUMS / o));
        for (long number = 0, first = 0; number < shift_parts; number++) {
            int t = (c.shifts - first) / (shift_parts - number);
            correlate_sized<MOST_ROWS, MOST_VECTORS>(c, row, first, o, t);
            first += t;
        }
        row += o;
    }
}

// Images of a batch: value(c, y)[x * batch + b]. Before and after each row there are `margin` zeros.
struct Images {
    long channels = 0, height = 0, width = 0, batch = 0, margin = 0, row = 0, plane = 0;
    std::vector<float> values;

    void shape(long channels_, long height_, long width_, long batch_, long margin_ = 0) {
        channels = channels_, height = height_, width = width_, batch = batch_, margin = margin_;
        row = whole(width * batch + 2 * margin);
        plane = row * height;
        values.assign(margin + channels * plane + margin + 8 * LANES * MOST_VECTORS, 0.0f);
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
        shift.clear(), factor.clear();
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
                   stride * source.row, shift.data(), terms, height, g.length()});
        if (further) to_input(weight);
    }
    void to_input(const float* weight) {
        Images& target = copied ? own_gradient : *in_gradient;
        Images& g = out_gradient;
        long area = kernel_y * kernel_x;
        std::vector<long> factors, shifts;
        for (long y = 0; y < target.height; y++)
            for (long phase = 0; phase < stride; phase++) {
                factors.clear(), shifts.clear();
                for (long ky = y % stride; ky < kernel_y && ky <= y; ky += stride) {
                    long from = (y - ky) / stride;
                    if (from >= height) continue;
                    for (long o = 0; o < channels; o++)
                        for (long kx = phase; kx < kernel_x; kx += stride) {
                            factors.push_back(o * in->channels * area + ky * kernel_x + kx);
                            shifts.push_back(o * g.plane + from * g.row - kx / stride * batch);
                        }
                }
                long columns = copied ? phase_width : target.width;
                combine({target.at(0, y) + phase * columns * batch, target.plane, in->channels, columns * batch, nullptr, weight,
                         area, g.at(0, 0), factors.data(), shifts.data(), (long)factors.size()});
            }
        if (!copied) return;
        for (long c = 0; c < in->channels; c++)
            for (long y = 0; y < in->height; y++)
                for (long x = 0; x < in->width; x++)
                    std::memcpy(in_gradient->at(c, y) + x * batch, own_gradient.at(c, y + padding) + column(x + padding) * batch,
                                4 * batch);
    }
};

struct Rectifier : Spatial {
    void forward(const float* const*&) override {
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++) {
                const float* from = in->at(c, y);
                float* to = out.at(c, y);
                for (long i = 0; i < out.length(); i++) to[i] = from[i] <= 0 ? 0 : from[i];  // NaN stays
            }
    }
    void backward(const float* const*&, float* const*&, bool) override {
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++) {
                const float *value = out.at(c, y), *from = out_gradient.at(c, y);
                float* to = in_gradient->at(c, y);
                for (long i = 0; i < out.length(); i++) to[i] = value[i] <= 0 ? 0 : from[i];
            }
    }
};

struct MaxPooling : Spatial {
    long size_y, size_x;
    std::vector<int32_t> chosen;
    void resize(long batch) override {
        Spatial::resize(batch);
        chosen.assign(channels * height * width * batch, 0);
    }
    void forward(const float* const*&) override {
        long batch = out.batch;
        int32_t* place = chosen.data();
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++)
                for (long x = 0; x < width; x++, place += batch) {
                    float* to = out.at(c, y) + x * batch;
                    const float* first = in->at(c, y * size_y) + x * size_x * batch;
                    for (long b = 0; b < batch; b++) to[b] = first[b], place[b] = 0;
                    for (long k = 1; k < size_y * size_x; k++) {
                        const float* from = in->at(c, y * size_y + k / size_x) + (x * size_x + k % size_x) * batch;
                        for (long b = 0; b < batch; b++) {
                            bool more = !(from[b] <= to[b]);
                            place[b] = more ? (int32_t)k : place[b];
                            to[b] = more ? from[b] : to[b];
                        }
                    }
                }
    }
    void backward(const float* const*&, float* const*&, bool) override {
        long batch = out.batch;
        const int32_t* place = chosen.data();
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++)
                for (long x = 0; x < width; x++, place += batch) {
                    const float* from = out_gradient.at(c, y) + x * batch;
                    for (long k = 0; k < size_y * size_x; k++) {
                        float* to = in_gradient->at(c, y * size_y + k / size_x) + (x * size_x + k % size_x) * batch;
                        for (long b = 0; b < batch; b++) to[b] = place[b] == k ? from[b] : 0;
                    }
                }
    }
};

// Features of a batch: values[feature * step + b].
struct Features {
    long count = 0, step = 0;
    std::vector<float> values;
    void shape(long count_, long batch) {
        count = count_, step = whole(batch);
        values.assign(count * step + LANES * MOST_VECTORS, 0.0f);
    }
};

struct Dense : Layer {
    Features *in, *in_gradient, out, out_gradient;
    long outputs, batch = 0;
    bool rectified = false;
    std::vector<long> factor, shift, back_factor, back_shift, batch_factor, batch_shift;
    std::vector<float> turned;  // the input [batch][features]
    void resize(long batch_) override {
        batch = batch_;
        out.shape(outputs, batch), out_gradient.shape(outputs, batch);
        long inputs = in->count;
        turned.assign(batch * inputs + LANES * MOST_VECTORS, 0.0f);
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
        if (rectified)
            for (float& value : out.values) value = value <= 0 ? 0 : value;
    }
    void backward(const float* const*& weights, float* const*& gradients, bool further) override {
        --weights;
        const float* weight = *--weights;
        float *to_bias = *--gradients, *to_weight = *--gradients;
        long inputs = in->count, step = out.step;
        float* g = out_gradient.values.data();
        if (rectified)
            for (size_t i = 0; i < out.values.size(); i++) g[i] = out.values[i] <= 0 ? 0 : g[i];
        for (long o = 0; to_bias && o < outputs; o++) {
            Vector sum = {};
            for (long i = 0; i < step; i += LANES) sum += load(g + o * step + i);
            to_bias[o] = total(sum);
        }
        for (long b = 0; b < batch; b++)
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
    bool channels_last;
    Images input, unused;
    std::vector<std::unique_ptr<Layer>> layers;
    size_t first_weights = 0;  // the first layer that has weights
    long count = 0;            // of the weights
    Features *logits = nullptr, *to_logits = nullptr;

    void read(const float* x) {
        long area = height * width;
        for (long c = 0; c < channels; c++)
            for (long y = 0; y < height; y++) {
                float* to = input.at(c, y);
                for (long b = 0; b < batch; b++) {
                    const float* from = x + b * channels * area + (channels_last ? y * width * channels + c : c * area + y * width);
                    long step = channels_last ? channels : 1;
                    for (long i = 0; i < width; i++) to[i * batch + b] = from[i * step];
                }
            }
    }
    // Mean cross-entropy over the labels that are not negative, and its gradient by the logits.
    double lose(const int32_t* y) {
        long classes = logits->count, step = logits->step, counted = 0;
        for (long b = 0; b < batch; b++) counted += y[b] >= 0;
        double loss = 0;
        for (long b = 0; b < batch; b++) {
            const float* z = logits->values.data() + b;
            float* g = to_logits->values.data() + b;
            float most = z[0];
            for (long c = 1; c < classes; c++) most = std::max(most, z[c * step]);
            float sum = 0;
            for (long c = 0; c < classes; c++) sum += g[c * step] = std::exp(z[c * step] - most);
            for (long c = 0; c < classes; c++) g[c * step] *= y[b] < 0 ? 0 : 1 / (sum * counted);
            if (y[b] < 0) continue;
            loss += std::log(sum) + most - z[y[b] * step];
            g[y[b] * step] -= 1.0f / counted;
        }
        return loss / counted;  // NaN if none is counted
    }
};

extern "C" {
// layers: 6 numbers each: kind, then outputs and what the kind needs.
void* create(const int64_t* layers, int64_t count, int64_t channels, int64_t height, int64_t width, int32_t channels_last) {
    auto chain = std::make_unique<Chain>();
    chain->channels = channels, chain->height = height, chain->width = width, chain->channels_last = channels_last;
    Images *at = &chain->input, *gradient = &chain->unused;
    Features *flat = nullptr, *flat_gradient = nullptr;
    long c = channels, h = height, w = width;
    bool found = false;
    for (int64_t i = 0; i < count; i++, layers += 6) {
        std::unique_ptr<Layer> layer;
        auto spatial = [&](auto made) {
            made->in = at, made->in_gradient = gradient;
            made->channels = c, made->height = h, made->width = w;
            at = &made->out, gradient = &made->out_gradient;
            layer = std::move(made);
        };
        if (layers[0] == 0) {
            auto made = std::make_unique<Convolution>();
            made->kernel_y = layers[2], made->kernel_x = layers[3], made->stride = layers[4], made->padding = layers[5];
            c = layers[1];
            h = (h + 2 * made->padding - made->kernel_y) / made->stride + 1;
            w = (w + 2 * made->padding - made->kernel_x) / made->stride + 1;
            spatial(std::move(made));
        } else if (layers[0] == 1) {
            spatial(std::make_unique<Rectifier>());
        } else if (layers[0] == 2) {
            auto made = std::make_unique<MaxPooling>();
            made->size_y = layers[2], made->size_x = layers[3];
            h /= made->size_y, w /= made->size_x;
            spatial(std::move(made));
        } else if (layers[0] == 3) {
            auto made = std::make_unique<Flattening>();
            made->in = at, made->in_gradient = gradient;
            flat = &made->out, flat_gradient = &made->out_gradient;
            layer = std::move(made);
        } else {
            auto made = std::make_unique<Dense>();
            made->in = flat, made->in_gradient = flat_gradient, made->outputs = layers[1], made->rectified = layers[2];
            flat = &made->out, flat_gradient = &made->out_gradient;
            layer = std::move(made);
        }
        bool has = layers[0] == 0 || layers[0] == 4;
        if (has && !found) chain->first_weights = chain->layers.size(), found = true;
        chain->count += has ? 2 : 0;
        chain->layers.push_back(std::move(layer));
    }
    chain->logits = flat, chain->to_logits = flat_gradient;
    return chain.release();
}

double differentiate(void* of, const float* x, const int32_t* y, int64_t batch, const float* const* weights, float* const* gradients) {
    Chain& chain = *static_cast<Chain*>(of);
    if (batch != chain.batch) {
        chain.batch = batch;
        chain.input.shape(chain.channels, chain.height, chain.width, batch);
        chain.unused.shape(chain.channels, chain.height, chain.width, batch);
        for (auto& layer : chain.layers) layer->resize(batch);
    }
    chain.read(x);
    for (auto& layer : chain.layers) layer->forward(weights);
    double loss = chain.lose(y);
    gradients += chain.count;
    for (size_t i = chain.layers.size(); i-- > chain.first_weights;)
        chain.layers[i]->backward(weights, gradients, i > chain.first_weights);
    return loss;
}

void destroy(void* of) { delete static_cast<Chain*>(of); }
}
