// Layers with their memory, for one size of batch. Images lie with the batch innermost, [channels][height][width * batch]: a step of one
// column is then a step of `batch` floats, so whole rows are vectors without gaps, however few channels there are. Rows end in zeros up to
// a whole vector, and stay so.

#pragma once

#include <cmath>

#include "products.h"

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
