// Functions for pixels that are in memory:
//
// - `read` resizes, crops, transposes and flips a region of an array as Pillow does (see resample.h);
// - `draw` draws strokes as `_Pen` in raster.py does with NumPy: the same numbers in the same order, so the same bits;
// - `floats` converts bytes to floats, which are normalised.
#include "resample.h"

// read(pixels, out, width, channels, ...): see the table of methods at the end.
static PyObject *read_region(PyObject *self, PyObject *args) {
    Py_buffer pixels, out;
    Plan plan;
    int region[4];
    int image_width;
    int result = -1;
    char error[ERROR_LENGTH] = "no memory to resize an image";
    memset(&plan, 0, sizeof plan);
    if (!PyArg_ParseTuple(args, "y*w*ii" PLAN_FORMAT, &pixels, &out, &image_width, &plan.channels,
                          PLAN_ARGS(region, plan))) return NULL;
    int accepted = !plan_check(&plan, region, &out, error);
    if (accepted && (region[2] > image_width || (Py_ssize_t)region[3] * image_width * plan.channels > pixels.len)) {
        accepted = 0;
        snprintf(error, ERROR_LENGTH,
                 "region (%d, %d, %d, %d) lies outside the image: %zd bytes, %d pixels wide, %d channels",
                 region[0], region[1], region[2], region[3], pixels.len, image_width, plan.channels);
    }
    if (accepted) {
        Py_BEGIN_ALLOW_THREADS   // Other Python threads run while this one resizes
        size_t stride = (size_t)image_width * plan.channels;
        size_t row_bytes = (size_t)plan.width * plan.channels;
        u8 *copy = NULL;   // A copy of a row that is too near the end of the pixels: `plan_row` may read past a row
        if (!plan_make(&plan) && (copy = malloc(row_bytes + plan_slack(&plan)))) {
            const u8 *start = (const u8 *)pixels.buf + (size_t)region[1] * stride + (size_t)region[0] * plan.channels;
            const u8 *end = (const u8 *)pixels.buf + pixels.len;
            for (int y = plan.needed[1]; y < plan.needed[3]; y++) {
                const u8 *row = start + y * stride;
                if (end - row < (ptrdiff_t)(row_bytes + plan_slack(&plan))) {
                    memcpy(copy, row, row_bytes);
                    row = copy;
                }
                plan_row(&plan, y, row);
            }
            plan_finish(&plan);
            result = 0;
        }
        plan_free(&plan);
        free(copy);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    if (result) {
        PyErr_SetString(PyExc_ValueError, error);
        return NULL;
    }
    Py_RETURN_NONE;
}

// How strokes are drawn. Distances are in pixels of the result, except where "fixed point" is said:
// these are whole numbers of 16 bits, which vector instructions compute eight at a time.
typedef struct {
    int size;        // Width and height of the result
    float radius;    // Pixels whose centre is nearer to the line than this are ink, without antialiasing
    float reach;     // Pixels whose centre is further from the line than this have no ink, with antialiasing
    float scale;     // Pixels per unit of the strokes, which have values 0..255
    int shift;       // Fixed-point distances from the line count in units of 1 / (255 << shift) pixels
    int one;         // One pixel in these units: 255 << shift
    float along;     // Fixed-point distances along the line count in units of 1 / along pixels
    int rows;        // Pixels across a line that can have ink, in each of its columns
    int antialias;   // Grey values at the edge of the ink if true, else only 0 and 255
    int channels;    // 1 or 3
} Pen;

// Vectors of GCC and clang: arithmetic on them works element by element, and a comparison gives -1 for true.
typedef int16_t v8 __attribute__((vector_size(16)));
typedef uint16_t v8u __attribute__((vector_size(16)));
typedef u8 v8b __attribute__((vector_size(8)));

static const v8u indices = {0, 1, 2, 3, 4, 5, 6, 7};

// Rounds up to a whole number, as `ceil`.
static int round_up(float v) {
    int i = (int)v;
    return i + (v > (float)i);
}

// Makes each of `n` pixels at least as bright as its value in `ink`. The pixels begin at number `start` and are `step`
// pixels apart. `colour` has one byte per channel; NULL is white on one channel.
static inline void put_ink(const Pen *pen, u8 *out, ptrdiff_t start, ptrdiff_t step, const u8 *ink, int n,
                           const u8 *colour) {
    if (!colour) {
        u8 *pixel = out + start;
        for (int j = 0; j < n; j++) {
            *pixel = *pixel < ink[j] ? ink[j] : *pixel;
            pixel += step;
        }
        return;
    }
    for (int j = 0; j < n; j++) {
        for (int c = 0; c < pen->channels; c++) {
            u8 *pixel = out + (start + j * step) * pen->channels + c;
            u8 value = (u8)(ink[j] * colour[c] / 255);
            if (*pixel < value) *pixel = value;
        }
    }
}

// Draws the disc around a point.
static void draw_disc(const Pen *pen, u8 *out, float point_x, float point_y, const u8 *colour) {
    float reach = pen->reach;
    float radius = pen->radius;
    int x = round_up(point_x - reach);   // The top left pixel of the square around the disc
    int y = round_up(point_y - reach);
    int n = (int)(2 * reach) + 1;        // Its width and height
    int first = x < 0 ? -x : 0;          // The columns of the square that are inside the picture
    int end = x + n > pen->size ? pen->size - x : n;
    for (int j = 0; j < n; j++) {
        float dy = (float)y - point_y + (float)j;
        u8 ink[288];   // 2 * 130 + 1, the largest `n`, rounded up to a multiple of 8, and some more
        if (y + j < 0 || y + j >= pen->size || first >= end) continue;
        dy *= dy;
        for (int i = 0; i < n; i += 8) {
            for (int q = i; q < i + 8; q++) {
                float dx = (float)x - point_x + (float)q;
                float distance = sqrtf(dy + dx * dx);
                float value = reach - distance;
                value = value < 0 ? 0 : value;
                value = value > 1 ? 1 : value;
                ink[q] = pen->antialias ? (u8)(int)(value * 255) : distance <= radius ? 255 : 0;
            }
        }
        put_ink(pen, out, (ptrdiff_t)(y + j) * pen->size + x + first, 1, ink + first, end - first, colour);
    }
}

// What the columns of a line have in common. `u` is the axis along which the line is longer, `v` the other one. So each
// position in u is a column (a row of the picture, if the line is steep) with a run of at most `pen->rows` ink pixels.
//
// Two numbers decide how much ink a pixel gets: its distance from the line, and its position along the line, which must
// lie between both ends. From a pixel to the next one in v, both change by a constant.
typedef struct {
    float distance_per_pixel;   // That change of the distance, in fixed-point units
    float position_per_pixel;   // And that of the position
    int16_t distance_step;      // Both again, rounded
    int16_t position_step;
    float reach;                // `pen->reach` and `pen->radius` in fixed-point units
    int16_t fixed_reach;
    int16_t fixed_radius;
    int16_t fixed_one;          // One pixel in fixed-point units
    uint16_t length;            // Length of the line in fixed-point units
    v8 used;                    // With fewer than 8 rows: -1 for each of these, 0 for the others, which get no ink
} Line;

static Line make_line(const Pen *pen, float cosine, float sine, float length) {
    float one = (float)pen->one;
    Line line;
    line.distance_per_pixel = cosine * one;
    line.position_per_pixel = sine * pen->along;
    line.distance_step = (int16_t)rintf(line.distance_per_pixel);
    line.position_step = (int16_t)rintf(line.position_per_pixel);
    line.reach = pen->reach * one;
    line.fixed_reach = (int16_t)line.reach;
    line.fixed_radius = (int16_t)(pen->radius * one);
    line.fixed_one = (int16_t)pen->one;
    line.length = (uint16_t)(length * pen->along);
    line.used = indices < (uint16_t)(pen->rows < 8 ? pen->rows : 8);
    return line;
}

// Computes the ink of one column, eight pixels at a time. `above_edge` is how far the first pixel lies above the edge
// of the ink, in pixels; `position` is where that edge is along the line, in fixed-point units.
static inline void column_ink(const Pen *pen, const Line *line, float above_edge, float position, u8 *ink) {
    position += above_edge * line->position_per_pixel;
    int16_t distance = (int16_t)(above_edge * line->distance_per_pixel - line->reach);
    // Unsigned arithmetic where it may wrap around, because C leaves signed overflow undefined.
    v8u distances = indices * (uint16_t)line->distance_step + (uint16_t)distance;
    v8u positions = indices * (uint16_t)line->position_step + (uint16_t)(int16_t)position;
    for (int k = 0; k < pen->rows; k += 8) {
        v8 mask = (v8)distances < 0;
        v8 value = (v8)((distances ^ (v8u)mask) - (v8u)mask);   // The absolute value of the distance
        if (pen->antialias) {
            value = (v8)((uint16_t)line->fixed_reach - (v8u)value);
            value &= value > 0;
            mask = value < line->fixed_one;
            value = (value & mask) | (line->fixed_one & ~mask);
            value >>= pen->shift;
        } else {
            value = (value <= line->fixed_radius) & 255;
        }
        // Before the start, a position is negative: as an unsigned number it is larger than any length.
        value &= line->used & (v8)(positions <= line->length);
        v8b bytes = __builtin_convertvector(value, v8b);
        memcpy(ink + k, &bytes, 8);
        distances += (uint16_t)(8 * line->distance_step);
        positions += (uint16_t)(8 * line->position_step);
    }
}

// Draws the line between two points, (x, y) each, without its round ends.
static void draw_segment(const Pen *pen, u8 *out, const float *from, const float *to, const u8 *colour) {
    float reach = pen->reach;
    int steep = fabsf(to[1] - from[1]) > fabsf(to[0] - from[0]);
    int size = pen->size;
    int rows = pen->rows;
    float u = from[steep];
    float v = from[!steep];
    float du = to[steep] - u;
    float dv = to[!steep] - v;
    if (du < 0) {   // Go in the direction of growing u
        u += du;
        v += dv;
        dv = -dv;
        du = -du;
    }
    float length = sqrtf(du * du + dv * dv);
    if (!(length > 0)) return;   // So short that its square is zero
    float cosine = du / length;
    float sine = dv / length;
    float first_u = ceilf(u - reach * fabsf(sine));
    int first_column = (int)first_u;
    int columns = (int)(floorf(u + du + reach * fabsf(sine)) - first_u + 1);
    ptrdiff_t u_step = steep ? size : 1;   // From a pixel to the next one in u, and in v
    ptrdiff_t v_step = steep ? 1 : size;
    // In column i, the ink begins at v = edge_start + i * slope. That point of its edge is at
    // position_start + i * position_slope along the line, in fixed-point units.
    float edge_start = v - reach / cosine + (first_u - u) * sine / cosine;
    float slope = sine / cosine;
    float position_start = (first_u - u - reach * sine) / cosine * pen->along;
    float position_slope = pen->along / cosine;
    const Line line = make_line(pen, cosine, sine, length);
    for (int i = 0; i < columns; i++) {
        float edge = edge_start + (float)i * slope;
        int row = round_up(edge);            // The first pixel above the edge
        int first = row < 0 ? -row : 0;      // The pixels of the run that are inside the picture
        int end = row + rows > size ? size - row : rows;
        if (first_column + i < 0 || first_column + i >= size || first >= end) continue;
        u8 ink[384];
        column_ink(pen, &line, (float)row - edge, position_start + (float)i * position_slope, ink);
        ptrdiff_t start = (first_column + i) * u_step + row * v_step;
        u8 *pixel = out + start;
        if (colour || first || rows > 8 || row + 8 > size) {
            put_ink(pen, out, start + first * v_step, v_step, ink + first, end - first, colour);
        } else if (steep) {   // The usual case: `put_ink` with constants, which is faster
            for (int j = 0; j < 8; j++) pixel[j] = pixel[j] < ink[j] ? ink[j] : pixel[j];
        } else {
            for (int j = 0; j < 8; j++) pixel[j * size] = pixel[j * size] < ink[j] ? ink[j] : pixel[j * size];
        }
    }
}

// Reads the number of points of the stroke at `*position`, and moves `*position` to the first x coordinate. The number
// is stored in base 128, the lowest digit first; all digits but the last have their highest bit set.
// Returns 0 if the bytes are damaged. Otherwise the coordinates, all x and then all y, lie within the data.
static size_t read_stroke(const u8 *data, size_t length, size_t *position) {
    size_t i = *position;
    size_t points = 0;
    int bits = 0;
    do {
        if (i >= length || bits > 28) return 0;
        points |= (size_t)(data[i] & 127) << bits;
        bits += 7;
    } while (data[i++] & 128);
    if (bits > 7 && !data[i - 1]) return 0;   // A leading zero: `pack_strokes` writes none
    if (2 * points > length - i) return 0;
    *position = i;
    return points;
}

enum {DRAWN = 0, DAMAGED = -1, NO_COLOUR = -2};

// Finds the smallest and the largest x and y in a drawing.
static int find_bounds(const u8 *data, size_t length, int *smallest, int *largest) {
    size_t position = 0;
    if (!length) return DAMAGED;
    while (position < length) {
        size_t points = read_stroke(data, length, &position);
        if (!points) return DAMAGED;
        for (int axis = 0; axis < 2; axis++) {
            const u8 *values = data + position + axis * points;
            for (size_t j = 0; j < points; j++) {
                if (values[j] < smallest[axis]) smallest[axis] = values[j];
                if (values[j] > largest[axis]) largest[axis] = values[j];
            }
        }
        position += 2 * points;
    }
    return DRAWN;
}

// Draws one drawing, centred. `*colour` is the colour of its first stroke, or NULL for white on one channel. It is
// moved past the colour of its last stroke. Returns DRAWN, DAMAGED or NO_COLOUR.
static int draw_strokes(const Pen *pen, const u8 *data, size_t length, u8 *out, const u8 **colour,
                        const u8 *colours_end) {
    int smallest[2] = {255, 255};
    int largest[2] = {0, 0};
    if (find_bounds(data, length, smallest, largest)) return DAMAGED;
    float offset[2];
    for (int axis = 0; axis < 2; axis++) offset[axis] = (float)(127 - (smallest[axis] + largest[axis]) / 2);
    float margin = pen->radius - .5f;
    size_t position = 0;
    while (position < length) {
        size_t points = read_stroke(data, length, &position);
        const u8 *coordinates[2] = {data + position, data + position + points};
        const u8 *stroke_colour = NULL;
        position += 2 * points;
        if (*colour) {
            if (*colour + pen->channels > colours_end) return NO_COLOUR;
            stroke_colour = *colour;
            *colour += pen->channels;
        }
        float point[2];
        float last[2] = {0, 0};
        for (size_t j = 0; j < points; j++) {
            for (int axis = 0; axis < 2; axis++)
                point[axis] = ((float)coordinates[axis][j] + offset[axis]) * pen->scale + margin;
            draw_disc(pen, out, point[0], point[1], stroke_colour);
            if (j && (point[0] != last[0] || point[1] != last[1]))
                draw_segment(pen, out, last, point, stroke_colour);
            memcpy(last, point, sizeof point);
        }
    }
    return DRAWN;
}

// Checks the arguments of `draw` that the buffers and the fixed-point numbers depend on.
// Returns 0, or -1 with the reason in `error`. The comparisons of floats are written so that they also reject NaN.
static int pen_check(const Pen *pen, Py_ssize_t drawings, Py_ssize_t out_bytes, char *error) {
    if (pen->size < 8 || pen->size > 4096) {
        snprintf(error, ERROR_LENGTH, "size must lie in 8..4096, not %d", pen->size);
    } else if (!(pen->reach > 0 && pen->reach <= 130)) {
        snprintf(error, ERROR_LENGTH, "reach must be more than 0 and at most 130 pixels, not %g", pen->reach);
    } else if (!(pen->radius >= -1 && pen->radius <= pen->reach)) {
        snprintf(error, ERROR_LENGTH, "radius must lie between -1 and reach (%g), not %g", pen->reach, pen->radius);
    } else if (!(pen->scale >= 0 && pen->scale * 255 <= (float)pen->size)) {
        snprintf(error, ERROR_LENGTH, "scale %g does not fit values 0..255 into %d pixels", pen->scale, pen->size);
    } else if (pen->shift < 0 || pen->shift >= 8) {
        snprintf(error, ERROR_LENGTH, "shift must lie in 0..7, not %d", pen->shift);
    } else if (!((pen->reach + 2) * (float)(255 << pen->shift) <= 32767)) {
        snprintf(error, ERROR_LENGTH, "with shift %d, distances of up to %g pixels do not fit 16 bits",
                 pen->shift, pen->reach + 2);
    } else if (pen->channels != 1 && pen->channels != 3) {
        snprintf(error, ERROR_LENGTH, "the number of channels must be 1 or 3, not %d", pen->channels);
    } else if (out_bytes != drawings * pen->size * pen->size * pen->channels) {
        snprintf(error, ERROR_LENGTH,
                 "the output has %zd bytes, which is not the size of %zd drawings of %d x %d pixels, %d channels",
                 out_bytes, drawings, pen->size, pen->size, pen->channels);
    } else {
        return 0;
    }
    return -1;
}

// draw(drawings, out, ...): see the table of methods at the end.
static PyObject *draw(PyObject *self, PyObject *args) {
    PyObject *list;
    Py_buffer out;
    Py_buffer colours = {0};
    Pen pen;
    char error[ERROR_LENGTH] = "no memory to draw";
    if (!PyArg_ParseTuple(args, "O!w*ifffipiz*", &PyList_Type, &list, &out, &pen.size, &pen.radius, &pen.reach,
                          &pen.scale, &pen.shift, &pen.antialias, &pen.channels, &colours)) return NULL;
    Py_ssize_t drawings = PyList_Size(list);
    char **data = malloc(sizeof(char *) * (drawings + 1));
    Py_ssize_t *lengths = malloc(sizeof(Py_ssize_t) * (drawings + 1));
    int ok = data && lengths && !pen_check(&pen, drawings, out.len, error);
    for (Py_ssize_t i = 0; ok && i < drawings; i++)
        ok = !PyBytes_AsStringAndSize(PyList_GetItem(list, i), data + i, lengths + i);   // Sets a TypeError if not ok
    if (ok) {
        pen.one = 255 << pen.shift;
        pen.along = (float)(20000. / pen.size);
        pen.rows = (int)(2.83 * (double)pen.reach) + 1;   // 2 * sqrt(2) * reach: across a line of 45 degrees
        const u8 *colour = colours.buf;
        const u8 *colours_end = (const u8 *)colours.buf + colours.len;
        size_t picture_bytes = (size_t)pen.size * pen.size * pen.channels;
        Py_BEGIN_ALLOW_THREADS   // Other Python threads run while this one draws
        for (Py_ssize_t i = 0; ok && i < drawings; i++) {
            u8 *picture = (u8 *)out.buf + i * picture_bytes;
            memset(picture, 0, picture_bytes);   // One by one, so that it is in the cache when it is drawn
            int outcome = draw_strokes(&pen, (const u8 *)data[i], lengths[i], picture, &colour, colours_end);
            if (outcome == DAMAGED) snprintf(error, ERROR_LENGTH, "drawing %zd is damaged", i);
            if (outcome == NO_COLOUR) snprintf(error, ERROR_LENGTH, "inks has too few colours for drawing %zd", i);
            ok = outcome == DRAWN;
        }
        Py_END_ALLOW_THREADS
    }
    free(data);
    free(lengths);
    PyBuffer_Release(&out);
    if (colours.buf) PyBuffer_Release(&colours);
    if (ok) Py_RETURN_NONE;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error);
    return NULL;
}

// A byte as a float. The operations are those of torch, in its order and precision; `plain`: mean 0 and std 1, which
// change nothing.
static inline __attribute__((always_inline)) float to_float(u8 byte, float div, float mean, float std, int plain) {
    float value = (float)byte / div;
    return plain ? value : (value - mean) / std;
}

static inline __attribute__((always_inline)) void fill_floats(const u8 *restrict source, float *target, Py_ssize_t n,
                                                              Py_ssize_t copies, float div, float mean, float std,
                                                              int plain) {
    if (copies == 3) {   // One pass for the usual number of copies
        float *restrict red = target;
        float *restrict green = target + n;
        float *restrict blue = target + 2 * n;
        for (Py_ssize_t i = 0; i < n; i++) red[i] = green[i] = blue[i] = to_float(source[i], div, mean, std, plain);
    } else {
        float *restrict first = target;
        for (Py_ssize_t i = 0; i < n; i++) first[i] = to_float(source[i], div, mean, std, plain);
        for (Py_ssize_t c = 1; c < copies; c++) memcpy(target + c * n, target, n * 4);
    }
}

// What `floats` does for a plane of bytes, and as many copies of the result.
static inline __attribute__((always_inline)) void plane_floats(const u8 *source, float *target, Py_ssize_t n,
                                                               Py_ssize_t copies, float div, float mean, float std) {
    if (mean == 0 && std == 1) fill_floats(source, target, n, copies, div, mean, std, 1);
    else fill_floats(source, target, n, copies, div, mean, std, 0);
}

#ifdef AVX2
AVX2 static void plane_floats_avx2(const u8 *source, float *target, Py_ssize_t n, Py_ssize_t copies, float div,
                                   float mean, float std) {
    plane_floats(source, target, n, copies, div, mean, std);
}
#endif

// floats(pixels, out, plane, shared, div, mean, std): see the table of methods at the end.
static PyObject *floats(PyObject *self, PyObject *args) {
    Py_buffer pixels, out, mean, std;
    Py_ssize_t plane;
    int shared;
    float div;
    if (!PyArg_ParseTuple(args, "y*w*npfy*y*", &pixels, &out, &plane, &shared, &div, &mean, &std)) return NULL;
    Py_ssize_t channels = mean.len / 4;
    Py_ssize_t copies = shared ? channels : 1;
    int ok = plane > 0 && channels > 0 && mean.len == channels * 4 && std.len == mean.len;
    ok = ok && pixels.len % plane == 0 && (shared || pixels.len / plane % channels == 0);
    if (pixels.len == 0) ok = ok && out.len == 0;
    // The quotient is compared first, so that the product cannot overflow.
    else ok = ok && copies == out.len / 4 / pixels.len && out.len == pixels.len * copies * 4;
    if (ok) {
        // Other Python threads run meanwhile, unless there are so few bytes that the switch would take longer.
        PyThreadState *state = pixels.len < 1 << 16 ? NULL : PyEval_SaveThread();
        const float *means = mean.buf, *stds = std.buf;
        int same = shared;   // Are all channels of an image the same?
        for (Py_ssize_t c = 1; c < channels; c++) same = same && means[c] == means[0] && stds[c] == stds[0];
        Py_ssize_t step = same ? copies : 1;
        Py_ssize_t planes = pixels.len / plane * copies;
        void (*convert)(const u8 *, float *, Py_ssize_t, Py_ssize_t, float, float, float) = plane_floats;
#ifdef AVX2
        if (has_avx2()) convert = plane_floats_avx2;
#endif
        for (Py_ssize_t k = 0; k < planes; k += step)
            convert((const u8 *)pixels.buf + k / copies * plane, (float *)out.buf + k * plane, plane, step, div,
                    means[k % channels], stds[k % channels]);
        if (state) PyEval_RestoreThread(state);
    } else {
        PyErr_Format(PyExc_ValueError,
                     "floats: %zd bytes in planes of %zd, %s, do not give an output of %zd bytes with %zd channels",
                     pixels.len, plane, shared ? "one for all channels" : "one a channel", out.len, channels);
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    PyBuffer_Release(&mean);
    PyBuffer_Release(&std);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

// What PNG's filter 4 predicts: the one of its neighbours that is nearest to their sum.
static inline u8 paeth(int left, int above, int corner) {
    int from_left = abs(above - corner), from_above = abs(left - corner), from_corner = abs(left + above - 2 * corner);
    if (from_left <= from_above && from_left <= from_corner) return (u8)left;
    return (u8)(from_above <= from_corner ? above : corner);
}

// One row of a PNG; `above` is the row before, or zeros. Returns whether there is such a filter.
static int unfilter_row(u8 filter, const u8 *bytes, u8 *row, const u8 *above, Py_ssize_t n, Py_ssize_t pixel) {
    if (filter > 4) return 0;
    for (Py_ssize_t i = 0; i < pixel; i++) {   // The first pixel has none to its left
        u8 predicted = filter == 2 || filter == 4 ? above[i] : filter == 3 ? above[i] / 2 : 0;
        row[i] = (u8)(bytes[i] + predicted);
    }
    if (filter == 0) memcpy(row, bytes, n);
    else if (filter == 1)
        for (Py_ssize_t i = pixel; i < n; i++) row[i] = (u8)(bytes[i] + row[i - pixel]);
    else if (filter == 2)
        for (Py_ssize_t i = pixel; i < n; i++) row[i] = (u8)(bytes[i] + above[i]);
    else if (filter == 3)
        for (Py_ssize_t i = pixel; i < n; i++) row[i] = (u8)(bytes[i] + (row[i - pixel] + above[i]) / 2);
    else
        for (Py_ssize_t i = pixel; i < n; i++)
            row[i] = (u8)(bytes[i] + paeth(row[i - pixel], above[i], above[i - pixel]));
    return 1;
}

// unfilter(rows, out, width, pixel): see the table of methods at the end.
static PyObject *unfilter(PyObject *self, PyObject *args) {
    Py_buffer rows, out;
    Py_ssize_t width, pixel;
    if (!PyArg_ParseTuple(args, "y*w*nn", &rows, &out, &width, &pixel)) return NULL;
    int ok = pixel > 0 && width >= pixel && width <= out.len && out.len % width == 0;
    ok = ok && rows.len - out.len == out.len / width;
    u8 *zeros = ok ? calloc(width, 1) : NULL;
    ok = ok && zeros;
    const u8 *above = zeros;
    for (Py_ssize_t k = 0; ok && k < out.len / width; k++) {
        const u8 *bytes = (const u8 *)rows.buf + k * (width + 1);
        u8 *row = (u8 *)out.buf + k * width;
        ok = unfilter_row(bytes[0], bytes + 1, row, above, width, pixel);
        above = row;
    }
    free(zeros);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&out);
    if (ok) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "unfilter: these are no rows of a PNG of this size");
    return NULL;
}

static PyMethodDef methods[] = {
    {"floats", floats, METH_VARARGS,
     "floats(pixels, out, plane, shared, div, mean, std)\n\n"
     "Write `(pixel/div-mean)/std` to the buffer `out` for each of the bytes `pixels`, as 32-bit floats. `mean` and\n"
     "`std` have a float for each channel. The bytes are planes of `plane` bytes: one for each channel of an image,\n"
     "or one for all of them if `shared`. Raises `ValueError`."},
    {"unfilter", unfilter, METH_VARARGS,
     "unfilter(rows, out, width, pixel)\n\n"
     "Write the pixels of a PNG to the buffer `out`, `width` bytes for each row. `rows` has one byte more for each\n"
     "row, the number of its filter, and `pixel` is the number of bytes of a pixel. Raises `ValueError`."},
    {"read", read_region, METH_VARARGS,
     "read(pixels, out, width, channels, region, crop, size, bicubic, window, orientation, columns_first)\n\n"
     "Resize `crop` of `region` of an array of shape (height, width, channels) to `size`, cut out `window`, transpose\n"
     "and flip it as `orientation` says, and write it to the buffer `out`, shape (channels, height, width).\n"
     "Raises `ValueError`."},
    {"draw", draw, METH_VARARGS,
     "draw(drawings, out, size, radius, reach, scale, shift, antialias, channels, inks)\n\n"
     "Draw a list of packed strokes, white on black, to the buffer `out`, shape (drawings, size, size, channels).\n"
     "`inks` has `channels` bytes for each stroke, its colour, or is None. Raises `ValueError`."},
    {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pixels", NULL, -1, methods};

PyMODINIT_FUNC PyInit__pixels(void) {
    return PyModule_Create(&module);
}
