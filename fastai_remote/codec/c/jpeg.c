// Decodes a region of a JPEG file, and resizes, crops, transposes and flips it on the way (see resample.h).
//
// libjpeg-turbo decodes only what the region needs: `jpeg_skip_scanlines` skips the rows above it and
// `jpeg_crop_scanline` limits the columns. The rows below it are never decoded.
#include "resample.h"
#include <setjmp.h>
#include <jpeglib.h>
#include <jerror.h>

#define MAX_SCANS 100   // As in images.py

// libjpeg reports an error by calling a function that must not return. Ours jumps back to `decode` with `longjmp`,
// which is C's way of raising an exception. `base` has to be the first member: libjpeg only knows that type.
typedef struct {
    struct jpeg_error_mgr base;
    jmp_buf caller;                   // Where to jump to
    char message[JMSG_LENGTH_MAX];    // What is wrong
} ErrorHandler;

static void raise_error(j_common_ptr info) {
    ErrorHandler *handler = (ErrorHandler *)info->err;
    handler->base.format_message(info, handler->message);
    longjmp(handler->caller, 1);
}

// Counts warnings (level -1) instead of printing them.
static void count_warning(j_common_ptr info, int level) {
    if (level < 0) info->err->num_warnings++;
}

// Called when the file ends too early. libjpeg would fill the rest of the image with grey; we raise an error.
static boolean end_of_file(j_decompress_ptr info) {
    ERREXIT(info, JERR_INPUT_EOF);
    return FALSE;
}

// libjpeg's name of the colour space of the file.
static const char *colour_space(const struct jpeg_decompress_struct *info) {
    switch (info->jpeg_color_space) {
        case JCS_GRAYSCALE: return "greyscale";
        case JCS_RGB: return "RGB";
        case JCS_YCbCr: return "YCbCr";
        case JCS_CMYK: return "CMYK";
        case JCS_YCCK: return "YCCK";
        default: return "unknown";
    }
}

// Can the file be decoded to this number of channels with the same result as Pillow?
static int can_decode(const struct jpeg_decompress_struct *info, int channels) {
    if (info->jpeg_color_space == JCS_GRAYSCALE) return 1;
    return channels == 3 && (info->jpeg_color_space == JCS_YCbCr || info->jpeg_color_space == JCS_RGB);
}

// Does a progressive file lack bits of its coefficients, because scans are missing or damaged? libjpeg then smooths the
// image. How it does this differs between versions, and depends on which blocks are decoded.
static int is_incomplete(const struct jpeg_decompress_struct *info) {
    if (!info->progressive_mode || !info->coef_bits) return 0;
    for (int component = 0; component < info->num_components; component++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (info->coef_bits[component][k] != 0) return 1;
    return 0;
}

// Called while libjpeg reads a file of several scans. Each scan can cost as much time as the whole image, and take only
// a few bytes. The caller decides about files of so many scans.
static void limit_scans(j_common_ptr info) {
    if (info->is_decompressor && ((j_decompress_ptr)info)->input_scan_number > MAX_SCANS)
        ERREXIT(info, JERR_NOTIMPL);
}

// Decodes the JPEG file `data` at 1/`denominator` of its size and passes the rows of `region` to `plan`.
// Returns 0, or -1 with the reason in `error`. After a `longjmp`, local variables that have changed since `setjmp` are
// undefined unless they are volatile.
static int decode(const u8 *data, size_t length, Plan *plan, const int *region, int denominator, char *error) {
    struct jpeg_decompress_struct info;
    struct jpeg_progress_mgr progress;
    ErrorHandler handler;
    u8 *volatile row = NULL;
    volatile int result = -1;
    int channels = plan->channels;
    const int *needed = plan->needed;
    memset(&info, 0, sizeof info);
    info.err = jpeg_std_error(&handler.base);
    handler.base.error_exit = raise_error;
    handler.base.emit_message = count_warning;
    if (setjmp(handler.caller)) {   // 0 now; not 0 when `raise_error` jumps here
        snprintf(error, ERROR_LENGTH, "%s", handler.message);
        goto end;
    }
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, data, length);
    info.src->fill_input_buffer = end_of_file;
    memset(&progress, 0, sizeof progress);
    progress.progress_monitor = limit_scans;
    info.progress = &progress;
    jpeg_read_header(&info, TRUE);
    info.out_color_space = channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
    info.scale_num = 1;
    info.scale_denom = denominator;
    if (!can_decode(&info, channels)) {
        snprintf(error, ERROR_LENGTH, "a JPEG of colour space %s cannot be decoded to %d channels here",
                 colour_space(&info), channels);
        goto end;
    }
    jpeg_start_decompress(&info);   // Reads all scans of a progressive file
    if (is_incomplete(&info)) {
        snprintf(error, ERROR_LENGTH, "a progressive JPEG with missing scans cannot be decoded here");
        goto end;
    }
    int width = info.output_width;
    if (region[2] > width || region[3] > (int)info.output_height) {
        snprintf(error, ERROR_LENGTH, "region (%d, %d, %d, %d) lies outside the %d x %d image",
                 region[0], region[1], region[2], region[3], width, (int)info.output_height);
        goto end;
    }
    // Two more columns on each side: where chroma is subsampled, the neighbours of a pixel contribute to it.
    int first_needed = region[0] + needed[0];
    int end_needed = region[0] + needed[2];
    JDIMENSION left = first_needed > 2 ? first_needed - 2 : 0;
    JDIMENSION right = end_needed + 2 < width ? end_needed + 2 : width;
    JDIMENSION columns = right - left;
    if (columns < info.output_width) jpeg_crop_scanline(&info, &left, &columns);   // Moves `left` to a block's start
    else left = 0;
    // `output_width` is now the number of decoded columns. The row begins at an odd address, because to an aligned
    // address libjpeg-turbo writes past the cache, and the row is read again at once.
    row = malloc((size_t)info.output_width * channels + 1 + plan_slack(plan));
    if (!row) {
        snprintf(error, ERROR_LENGTH, "no memory for a row of the image");
        goto end;
    }
    if (region[1] + needed[1]) jpeg_skip_scanlines(&info, region[1] + needed[1]);
    JSAMPROW rows[1] = {row + 1};
    ptrdiff_t region_start = ((ptrdiff_t)region[0] - (ptrdiff_t)left) * channels;   // May be negative
    for (int y = needed[1]; y < needed[3]; y++) {
        jpeg_read_scanlines(&info, rows, 1);
        plan_row(plan, y, rows[0] + region_start);
    }
    plan_finish(plan);
    jpeg_abort_decompress(&info);   // Do not decode the rest
    result = 0;
end:
    jpeg_destroy_decompress(&info);
    free(row);
    return result;
}

// read(data, out, denominator, channels, ...): see the table of methods below.
static PyObject *read_region(PyObject *self, PyObject *args) {
    Py_buffer data, out;
    Plan plan;
    int region[4];
    int denominator;
    int result = -1;
    char error[ERROR_LENGTH] = "no memory to resize an image";
    memset(&plan, 0, sizeof plan);
    if (!PyArg_ParseTuple(args, "y*w*ii" PLAN_FORMAT, &data, &out, &denominator, &plan.channels,
                          PLAN_ARGS(region, plan))) return NULL;
    if (denominator != 1 && denominator != 2 && denominator != 4 && denominator != 8) {
        snprintf(error, ERROR_LENGTH, "the denominator of the scale must be 1, 2, 4 or 8, not %d", denominator);
    } else if (!plan_check(&plan, region, &out, error)) {
        Py_BEGIN_ALLOW_THREADS   // Other Python threads run while this one decodes
        if (!plan_make(&plan)) result = decode(data.buf, data.len, &plan, region, denominator, error);
        plan_free(&plan);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    if (result) {
        PyErr_SetString(PyExc_ValueError, error);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read", read_region, METH_VARARGS,
     "read(data, out, denominator, channels, region, crop, size, bicubic, window, orientation, columns_first)\n\n"
     "Decode `region` of the JPEG file `data` at 1/`denominator` of its size, resize `crop` of it to `size`, cut out\n"
     "`window`, transpose and flip it as `orientation` says, and write it to the buffer `out`, shape\n"
     "(channels, height, width). Raises `ValueError`."},
    {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jpeg", NULL, -1, methods};

PyMODINIT_FUNC PyInit__jpeg(void) {
    return PyModule_Create(&module);
}
