// Local training of a chain of convolutions, pooling and dense layers, on one thread.

#include <memory>

#include "layers.h"

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
