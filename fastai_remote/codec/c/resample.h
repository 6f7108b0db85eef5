// Crops, resizes, transposes and flips a region of an image, and writes it as a tensor (channels, height, width).
//
// Both C modules include this file. A caller fills a `Plan`, passes the rows of the image to `plan_row` from top to
// bottom, and calls `plan_finish`. So the whole decoded image is never in memory, and each row is resized while it is
// in the processor's cache.
//
// The result is bit-identical to Pillow's (src/libImaging/Resample.c). Pillow resizes in two passes, one for each axis.
// Each pass multiplies bytes by weights in fixed point (whole numbers that count in units of 1 / 2^22) and rounds to
// bytes at the end. Where the processor has AVX2, vector instructions compute the same sums for many bytes at a time.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(NO_AVX2)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

#define ERROR_LENGTH 256           // Bytes of a buffer for an error message
#define WEIGHT_BITS 22             // A weight of 1.0 is stored as 1 << WEIGHT_BITS
#define HALF (1 << (WEIGHT_BITS - 1))   // Added to a sum before the shift, so that the shift rounds to nearest

typedef unsigned char u8;

// How one axis is resized: which input pixels contribute to each output pixel, and with which weights.
// If `first` is NULL, nothing is resized along this axis and output pixels are input pixels.
// The arrays have one entry per output pixel. Their length is rounded up to a multiple of 4 for the vector code.
typedef struct {
    int *first;      // Index of the first input pixel that contributes
    int *count;      // How many input pixels contribute
    int width;       // Number of stored weights per output pixel: the largest `count`, rounded up to a multiple of 4
    int16_t *high;   // Weights, shape (output pixels, width): weight = 256 * high + low, zero beyond `count`.
    int16_t *low;    // They are split because vector instructions multiply 16-bit numbers
} Filter;

// Everything about one call: the arguments, what follows from them, and buffers.
typedef struct {
    // The arguments. Sizes are in pixels. Regions are (x0, y0, x1, y1), where x1 and y1 are exclusive.
    int width, height, channels;         // Size of the region of the image that is the input
    float crop[4];                       // The part of that region that is resized; may be fractional
    int resized_width, resized_height;   // The size to which `crop` is resized
    int bicubic;                         // Bicubic filter if true, else bilinear
    int window[4];                       // The part of the resized image that is kept
    int transpose, flip_x, flip_y;       // `window` is transposed, then flipped
    int columns_first;                   // Resize in y before x (columns first). The order changes how results round
    u8 *out;                             // The result, shape (channels, height, width) after transposing
    // What follows from the arguments; set by `plan_make`.
    Filter filter_x, filter_y;
    int needed[4];                       // The part of the input region that contributes to `window`
    int use_avx2;
    // Buffers; allocated by `plan_make`.
    u8 *rows;        // All needed rows: input rows if `columns_first`, else rows resized in x, one plane per channel
    size_t stride;   // Bytes from one row (of one plane) in `rows` to the next
    u8 *line;        // One row after resizing in y
    u8 *planes;      // One row of the result, one plane per channel; used if `columns_first`
} Plan;

static int has_avx2(void) {
#ifdef AVX2
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

// The filters of Pillow: the weight of a pixel at distance `x` from the centre.
static double bilinear(double x) {
    x = fabs(x);
    return x < 1 ? 1 - x : 0;
}

static double bicubic(double x) {
    const double a = -.5;
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
    return 0;
}

// Converts a fixed-point sum to a byte. Bicubic weights can be negative, so the sum may lie outside 0..255.
static u8 to_byte(int sum) {
    sum >>= WEIGHT_BITS;
    if (sum < 0) return 0;
    return sum > 255 ? 255 : (u8)sum;
}

// Rounds a number of bytes up to a multiple of 32, the size of a vector.
static size_t round_up_32(size_t n) {
    return (n + 31) & ~(size_t)31;
}

static void filter_free(Filter *filter) {
    free(filter->first);
    free(filter->count);
    free(filter->high);
    free(filter->low);
    memset(filter, 0, sizeof *filter);
}

// Computes the weights of one output pixel with the given centre (in input pixels).
// `scratch` has room for `count` numbers.
static void filter_weights(double centre, double inverse_scale, int cubic, int first, int count, double *scratch,
                           int16_t *high, int16_t *low) {
    double sum = 0;
    for (int j = 0; j < count; j++) {
        double x = (j + first - centre + .5) * inverse_scale;
        scratch[j] = cubic ? bicubic(x) : bilinear(x);
        sum += scratch[j];
    }
    for (int j = 0; j < count; j++) {
        double weight = (sum != 0 ? scratch[j] / sum : scratch[j]) * (1 << WEIGHT_BITS);
        int rounded = (int)(weight < 0 ? weight - .5 : weight + .5);
        high[j] = (int16_t)(rounded >> 8);
        low[j] = (int16_t)(rounded & 255);
    }
}

// Makes the filter for output pixels `out_start` to `out_end` of `out_size`. Input pixels `in_start` to `in_end`
// (fractions allowed) of `in_size` become the `out_size` output pixels. If `reversed`, the output is mirrored.
// Returns 0, or -1 if there is not enough memory.
static int filter_make(Filter *filter, int in_size, float in_start, float in_end, int out_size, int cubic,
                       int out_start, int out_end, int reversed) {
    memset(filter, 0, sizeof *filter);
    if (out_size == in_size && in_start == 0 && in_end == (float)in_size) return 0;
    double scale = (double)(in_end - in_start) / out_size;   // Input pixels per output pixel
    double filter_scale = scale < 1 ? 1 : scale;             // When shrinking, the filter is widened: anti-aliasing
    double reach = (cubic ? 2. : 1.) * filter_scale;         // Input pixels further away have weight zero
    double inverse_scale = 1 / filter_scale;
    size_t length = ((size_t)(out_end - out_start) + 3) & ~(size_t)3;
    double *scratch = malloc(sizeof(double) * ((size_t)ceil(reach) * 2 + 1));
    filter->first = calloc(length, sizeof(int));
    filter->count = calloc(length, sizeof(int));
    for (int i = out_start; filter->first && filter->count && i < out_end; i++) {
        double centre = in_start + (i + .5) * scale;
        int first = (int)(centre - reach + .5);
        int end = (int)(centre + reach + .5);
        int index = reversed ? out_end - 1 - i : i - out_start;
        if (first < 0) first = 0;
        if (end > in_size) end = in_size;
        filter->first[index] = first;
        filter->count[index] = end - first;
        if (end - first > filter->width) filter->width = end - first;
    }
    filter->width = (filter->width + 3) & ~3;
    size_t width = filter->width;
    filter->high = calloc(length * width, sizeof(int16_t));
    filter->low = calloc(length * width, sizeof(int16_t));
    if (!scratch || !filter->first || !filter->count || !filter->high || !filter->low) {
        free(scratch);
        filter_free(filter);
        return -1;
    }
    for (int i = out_start; i < out_end; i++) {
        int index = reversed ? out_end - 1 - i : i - out_start;
        filter_weights(in_start + (i + .5) * scale, inverse_scale, cubic, filter->first[index], filter->count[index],
                       scratch, filter->high + index * width, filter->low + index * width);
    }
    // The entries that only round the length up read from the same place as the last pixel, with weights of zero.
    for (size_t i = out_end - out_start; i < length; i++) filter->first[i] = filter->first[out_end - out_start - 1];
    free(scratch);
    return 0;
}

static void plan_free(Plan *plan) {
    filter_free(&plan->filter_x);
    filter_free(&plan->filter_y);
    free(plan->rows);
    free(plan->line);
    free(plan->planes);
    plan->rows = plan->line = plan->planes = NULL;
}

// How many bytes the vector code may read after the end of a row. Callers of `plan_row` must make that safe.
static size_t plan_slack(const Plan *plan) {
    return 3 * (size_t)plan->filter_x.width + 32;
}

// Is the output mirrored along the x axis of the input? After a transposition, that axis is the output's y axis.
static int mirrored_x(const Plan *plan) {
    return plan->transpose ? plan->flip_y : plan->flip_x;
}

// Makes the filters and allocates the buffers, from arguments that `plan_check` accepted.
// Returns 0, or -1 if there is not enough memory. Call `plan_free` in both cases.
static int plan_make(Plan *plan) {
    const int *window = plan->window;
    const float *crop = plan->crop;
    int *needed = plan->needed;
    int width = window[2] - window[0];
    int height = window[3] - window[1];
    int reversed = mirrored_x(plan);
    if (filter_make(&plan->filter_x, plan->width, crop[0], crop[2], plan->resized_width, plan->bicubic,
                    window[0], window[2], reversed)) return -1;
    if (filter_make(&plan->filter_y, plan->height, crop[1], crop[3], plan->resized_height, plan->bicubic,
                    window[1], window[3], 0)) return -1;
    const Filter *filter_x = &plan->filter_x;
    const Filter *filter_y = &plan->filter_y;
    int left = reversed ? width - 1 : 0;   // Output pixels that read the leftmost and the rightmost input pixels
    int right = width - 1 - left;
    needed[0] = filter_x->first ? filter_x->first[left] : window[0];
    needed[1] = filter_y->first ? filter_y->first[0] : window[1];
    needed[2] = filter_x->first ? filter_x->first[right] + filter_x->count[right] : window[2];
    needed[3] = filter_y->first ? filter_y->first[height - 1] + filter_y->count[height - 1] : window[3];
    plan->use_avx2 = has_avx2();
    size_t channels = plan->channels;
    size_t plane = round_up_32(width);
    plan->stride = plan->columns_first ? round_up_32((needed[2] - needed[0]) * channels) : plane;
    size_t row_bytes = plan->stride * (plan->columns_first ? 1 : channels);
    plan->rows = malloc(row_bytes * (needed[3] - needed[1] + 1) + plan_slack(plan));
    plan->line = malloc(plan->stride + plan_slack(plan));
    plan->planes = malloc(plane * channels);
    return plan->rows && plan->line && plan->planes ? 0 : -1;
}

#ifdef AVX2
// Resizes a row of three channels in x: `width` output pixels, in one plane per channel, `plane` bytes apart.
// `in` is where pixel 0 of the row would be. `weights` is `filter->width`, as a separate argument: the function is
// inlined for the usual values, for which the compiler can then unroll the inner loop.
AVX2 static inline __attribute__((always_inline)) void resize_x_rgb_avx2(const Filter *filter, int width, const u8 *in,
                                                                         u8 *out, size_t plane, int weights) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i half = _mm256_set1_epi32(HALF);
    // Copies the weights of pixels 0 and 1 to each place of the lower half of a vector, those of 2 and 3 to the upper.
    const __m256i pairs = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    // Turns the bytes RGBRGBRGBRGB into 16-bit numbers: red of pixels 0 and 1, green, blue, nothing; then of 2 and 3.
    const __m256i spread = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
                                            6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    // Sorts four pixels RGB- into RRRR GGGG BBBB.
    const __m128i by_channel = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int16_t *high = filter->high;
    const int16_t *low = filter->low;
    for (int i = 0; i < width; i += 4) {   // Four output pixels at a time
        __m256i sums[4];
#pragma GCC unroll 4
        for (int pixel = 0; pixel < 4; pixel++) {
            const u8 *source = in + (ptrdiff_t)filter->first[i + pixel] * 3;
            __m256i high_sum = zero;
            __m256i low_sum = zero;
            for (int j = 0; j < weights; j += 4) {   // Four input pixels at a time
                __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)source));
                __m256i values = _mm256_shuffle_epi8(bytes, spread);
                __m256i four_high = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)high));
                __m256i four_low = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)low));
                __m256i high_weights = _mm256_permutevar8x32_epi32(four_high, pairs);
                __m256i low_weights = _mm256_permutevar8x32_epi32(four_low, pairs);
                high_sum = _mm256_add_epi32(high_sum, _mm256_madd_epi16(values, high_weights));
                low_sum = _mm256_add_epi32(low_sum, _mm256_madd_epi16(values, low_weights));
                source += 12;
                high += 4;
                low += 4;
            }
            sums[pixel] = _mm256_add_epi32(_mm256_slli_epi32(high_sum, 8), low_sum);
        }
        // Each of `sums` has one part from pixels 0 and 1 in its lower half and one from 2 and 3 in its upper half.
        __m256i a = _mm256_add_epi32(_mm256_permute2x128_si256(sums[0], sums[1], 0x20),
                                     _mm256_permute2x128_si256(sums[0], sums[1], 0x31));
        __m256i b = _mm256_add_epi32(_mm256_permute2x128_si256(sums[2], sums[3], 0x20),
                                     _mm256_permute2x128_si256(sums[2], sums[3], 0x31));
        // Round, shift, and clip to bytes; then sort them by channel.
        a = _mm256_srai_epi32(_mm256_add_epi32(a, half), WEIGHT_BITS);
        b = _mm256_srai_epi32(_mm256_add_epi32(b, half), WEIGHT_BITS);
        a = _mm256_packs_epi32(a, b);
        a = _mm256_packus_epi16(a, a);
        __m128i pixels = _mm_unpacklo_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        pixels = _mm_shuffle_epi8(pixels, by_channel);
        int four_bytes[3] = {_mm_cvtsi128_si32(pixels), _mm_extract_epi32(pixels, 1), _mm_extract_epi32(pixels, 2)};
        for (int c = 0; c < 3; c++) memcpy(out + c * plane + i, four_bytes + c, 4);
    }
}

AVX2 static void resize_x_rgb(const Filter *filter, int width, const u8 *in, u8 *out, size_t plane) {
    if (filter->width == 4) resize_x_rgb_avx2(filter, width, in, out, plane, 4);
    else if (filter->width == 8) resize_x_rgb_avx2(filter, width, in, out, plane, 8);
    else resize_x_rgb_avx2(filter, width, in, out, plane, filter->width);
}

// Computes one output row of `n` bytes: the weighted sum of `count` rows that start at `source`, `stride` bytes apart.
// It works on 32 bytes at a time and on two rows at a time, so it may read and write up to the next multiple of 32.
AVX2 static void resize_y_avx2(const int16_t *high, const int16_t *low, int count, const u8 *source, size_t stride,
                               size_t n, u8 *out) {
    const __m256i zero = _mm256_setzero_si256();
    for (size_t x = 0; x < n; x += 32) {
        __m256i high_sums[4] = {zero, zero, zero, zero};
        __m256i low_sums[4];
        for (int q = 0; q < 4; q++) low_sums[q] = _mm256_set1_epi32(HALF);
        for (int j = 0; j < count; j += 2) {
            const u8 *row = source + j * stride + x;
            int two_high, two_low;   // The weights of both rows, in one number
            memcpy(&two_high, high + j, 4);
            memcpy(&two_low, low + j, 4);
            __m256i high_weights = _mm256_set1_epi32(two_high);
            __m256i low_weights = _mm256_set1_epi32(two_low);
            __m256i first = _mm256_loadu_si256((const __m256i *)row);
            __m256i second = j + 1 < count ? _mm256_loadu_si256((const __m256i *)(row + stride)) : zero;
            // Interleave the rows, and widen bytes to 16-bit numbers.
            __m256i lower = _mm256_unpacklo_epi8(first, second);
            __m256i upper = _mm256_unpackhi_epi8(first, second);
            __m256i values[4] = {_mm256_unpacklo_epi8(lower, zero), _mm256_unpackhi_epi8(lower, zero),
                                 _mm256_unpacklo_epi8(upper, zero), _mm256_unpackhi_epi8(upper, zero)};
            for (int q = 0; q < 4; q++) {
                high_sums[q] = _mm256_add_epi32(high_sums[q], _mm256_madd_epi16(values[q], high_weights));
                low_sums[q] = _mm256_add_epi32(low_sums[q], _mm256_madd_epi16(values[q], low_weights));
            }
        }
        for (int q = 0; q < 4; q++) {
            __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high_sums[q], 8), low_sums[q]);
            low_sums[q] = _mm256_srai_epi32(sum, WEIGHT_BITS);
        }
        __m256i lower = _mm256_packs_epi32(low_sums[0], low_sums[1]);
        __m256i upper = _mm256_packs_epi32(low_sums[2], low_sums[3]);
        _mm256_storeu_si256((__m256i *)(out + x), _mm256_packus_epi16(lower, upper));
    }
}
#endif

// Copies the columns of `window` from a row of interleaved pixels (RGBRGB...) to one plane per channel.
static void copy_x(const Plan *plan, const u8 *in, u8 *out, size_t plane) {
    int width = plan->window[2] - plan->window[0];
    int channels = plan->channels;
    int reversed = mirrored_x(plan);
    in += (ptrdiff_t)plan->window[0] * channels;
    if (channels == 1 && !reversed) {
        memcpy(out, in, width);
        return;
    }
    for (int c = 0; c < channels; c++) {
        for (int i = 0; i < width; i++) out[i] = in[(ptrdiff_t)(reversed ? width - 1 - i : i) * channels + c];
        out += plane;
    }
}

// Resizes a row of interleaved pixels in x, and writes it to one plane per channel, `plane` bytes apart.
// `in` is where pixel 0 of the region would be; only the needed pixels have to be there.
static void resize_x(const Plan *plan, const u8 *in, u8 *out, size_t plane) {
    const Filter *filter = &plan->filter_x;
    int width = plan->window[2] - plan->window[0];
    int channels = plan->channels;
    if (!filter->first) {
        copy_x(plan, in, out, plane);
        return;
    }
#ifdef AVX2
    if (channels == 3 && plan->use_avx2) {
        resize_x_rgb(filter, width, in, out, plane);
        return;
    }
#endif
    for (int i = 0; i < width; i++) {
        const int16_t *high = filter->high + (size_t)i * filter->width;
        const int16_t *low = filter->low + (size_t)i * filter->width;
        const u8 *source = in + (ptrdiff_t)filter->first[i] * channels;
        int count = filter->count[i];
        if (channels == 3) {
            int red = HALF;
            int green = HALF;
            int blue = HALF;
            for (int j = 0; j < count; j++) {
                int weight = high[j] * 256 + low[j];
                red += source[3 * j] * weight;
                green += source[3 * j + 1] * weight;
                blue += source[3 * j + 2] * weight;
            }
            out[i] = to_byte(red);
            out[plane + i] = to_byte(green);
            out[2 * plane + i] = to_byte(blue);
        } else {
            int sum = HALF;
            for (int j = 0; j < count; j++) sum += source[j] * (high[j] * 256 + low[j]);
            out[i] = to_byte(sum);
        }
    }
}

// Returns row `i` of the window after resizing in y. `rows` are the needed rows: `n` bytes each, `stride` bytes apart.
// The result is in `plan->line`, or in `rows` if there is nothing to resize.
static const u8 *resize_y(const Plan *plan, int i, const u8 *rows, size_t stride, size_t n) {
    const Filter *filter = &plan->filter_y;
    if (!filter->first) return rows + (size_t)i * stride;
    const int16_t *high = filter->high + (size_t)i * filter->width;
    const int16_t *low = filter->low + (size_t)i * filter->width;
    const u8 *source = rows + (size_t)(filter->first[i] - plan->needed[1]) * stride;
    int count = filter->count[i];
#ifdef AVX2
    if (plan->use_avx2) {
        resize_y_avx2(high, low, count, source, stride, n, plan->line);
        return plan->line;
    }
#endif
    int sums[64];
    for (size_t x = 0; x < n; x += 64) {   // 64 bytes of each row at a time, so that the sums stay in the cache
        int bytes = n - x < 64 ? (int)(n - x) : 64;
        for (int q = 0; q < 64; q++) sums[q] = HALF;
        for (int j = 0; j < count; j++) {
            int weight = high[j] * 256 + low[j];
            const u8 *row = source + j * stride + x;
            for (int q = 0; q < bytes; q++) sums[q] += row[q] * weight;
        }
        for (int q = 0; q < bytes; q++) plan->line[x + q] = to_byte(sums[q]);
    }
    return plan->line;
}

// Takes row `y` of the region. Call it for each row from `needed[1]` to `needed[3]`, in this order.
// `in` is where pixel 0 of the region's row would be; the pixels from `needed[0]` to `needed[2]` have to be there,
// and `plan_slack` more bytes must be readable after them.
static void plan_row(Plan *plan, int y, const u8 *in) {
    const int *needed = plan->needed;
    size_t channels = plan->channels;
    size_t index = y - needed[1];
    if (plan->columns_first) {
        const u8 *first = in + (ptrdiff_t)(needed[0] * channels);
        memcpy(plan->rows + index * plan->stride, first, (needed[2] - needed[0]) * channels);
    } else {
        resize_x(plan, in, plan->rows + index * plan->stride * channels, plan->stride);
    }
}

// Does the rest of the work after the last call of `plan_row`, and writes the result to `plan->out`.
static void plan_finish(Plan *plan) {
    int width = plan->window[2] - plan->window[0];
    int height = plan->window[3] - plan->window[1];
    int channels = plan->channels;
    int reversed_y = plan->transpose ? plan->flip_x : plan->flip_y;
    size_t plane = round_up_32(width);
    for (int i = 0; i < height; i++) {
        int index = reversed_y ? height - 1 - i : i;   // Row of the result, or its column if it is transposed
        u8 *out = plan->out + (plan->transpose ? (size_t)index : (size_t)index * width);
        if (plan->columns_first) {
            size_t row_bytes = (size_t)(plan->needed[2] - plan->needed[0]) * channels;
            const u8 *row = resize_y(plan, i, plan->rows, plan->stride, row_bytes);
            resize_x(plan, row - (ptrdiff_t)plan->needed[0] * channels, plan->planes, plane);
        }
        for (int c = 0; c < channels; c++) {
            const u8 *row;
            if (plan->columns_first) row = plan->planes + c * plane;
            else row = resize_y(plan, i, plan->rows + c * plan->stride, plan->stride * channels, width);
            if (plan->transpose) for (int x = 0; x < width; x++) out[(size_t)x * height] = row[x];
            else memcpy(out, row, width);
            out += (size_t)width * height;
        }
    }
}

// The arguments that both modules take after their sources, as `PyArg_ParseTuple` reads them:
// region, crop, size, bicubic, window, (transpose, flip_x, flip_y), columns_first.
#define PLAN_FORMAT "(iiii)(ffff)(ii)p(iiii)(ppp)p"
#define PLAN_ARGS(region, plan) \
    &(region)[0], &(region)[1], &(region)[2], &(region)[3], \
    &(plan).crop[0], &(plan).crop[1], &(plan).crop[2], &(plan).crop[3], \
    &(plan).resized_width, &(plan).resized_height, &(plan).bicubic, \
    &(plan).window[0], &(plan).window[1], &(plan).window[2], &(plan).window[3], \
    &(plan).transpose, &(plan).flip_x, &(plan).flip_y, &(plan).columns_first

// Checks the arguments that do not depend on the size of the image, and sets `width`, `height` and `out` of the plan.
// Returns 0, or -1 with the reason in `error`, which has ERROR_LENGTH bytes.
// The comparisons of floats are written so that they also reject NaN.
static int plan_check(Plan *plan, const int *region, const Py_buffer *out, char *error) {
    const float *crop = plan->crop;
    const int *window = plan->window;
    if (region[0] < 0 || region[1] < 0 || region[2] <= region[0] || region[3] <= region[1] || region[2] > 65535
        || region[3] > 65535) {
        snprintf(error, ERROR_LENGTH, "region (%d, %d, %d, %d) must lie within 65535 x 65535 pixels and not be empty",
                 region[0], region[1], region[2], region[3]);
        return -1;
    }
    plan->width = region[2] - region[0];
    plan->height = region[3] - region[1];
    if (!(crop[0] >= 0 && crop[1] >= 0 && crop[2] > crop[0] && crop[3] > crop[1] && crop[2] <= plan->width
          && crop[3] <= plan->height)) {
        snprintf(error, ERROR_LENGTH, "crop (%g, %g, %g, %g) is empty or lies outside the %d x %d region",
                 crop[0], crop[1], crop[2], crop[3], plan->width, plan->height);
        return -1;
    }
    if (plan->resized_width < 1 || plan->resized_height < 1 || plan->resized_width > 65535
        || plan->resized_height > 65535) {
        snprintf(error, ERROR_LENGTH, "size (%d, %d) must lie in 1..65535",
                 plan->resized_width, plan->resized_height);
        return -1;
    }
    if (window[0] < 0 || window[1] < 0 || window[2] <= window[0] || window[3] <= window[1]
        || window[2] > plan->resized_width || window[3] > plan->resized_height) {
        snprintf(error, ERROR_LENGTH, "window (%d, %d, %d, %d) is empty or lies outside the resized %d x %d image",
                 window[0], window[1], window[2], window[3], plan->resized_width, plan->resized_height);
        return -1;
    }
    if (plan->channels != 1 && plan->channels != 3) {
        snprintf(error, ERROR_LENGTH, "the number of channels must be 1 or 3, not %d", plan->channels);
        return -1;
    }
    Py_ssize_t bytes = (Py_ssize_t)(window[2] - window[0]) * (window[3] - window[1]) * plan->channels;
    if (out->len != bytes) {
        snprintf(error, ERROR_LENGTH, "the output has %zd bytes, but the result has %zd: %d channels of %d x %d pixels",
                 out->len, bytes, plan->channels, window[2] - window[0], window[3] - window[1]);
        return -1;
    }
    plan->out = out->buf;
    return 0;
}
