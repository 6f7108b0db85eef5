// Part of a JPEG: jpeg_skip_scanlines and jpeg_crop_scanline of libjpeg-turbo, which undo only what is needed of the rows and columns asked for
#include "resample.h"
#include <setjmp.h>
#include <stdio.h>
#include <jpeglib.h>
#include <jerror.h>

typedef struct { struct jpeg_error_mgr pub; jmp_buf jump; char why[JMSG_LENGTH_MAX]; } Errors;

static void fail(j_common_ptr c) { Errors *e = (Errors*)c->err; e->pub.format_message(c, e->why); longjmp(e->jump, 1); }
static void quiet(j_common_ptr c, int level) { if (level<0) c->err->num_warnings++; }
static boolean cut(j_decompress_ptr c) { ERREXIT(c, JERR_INPUT_EOF); return FALSE; }

// 0, or -1 with the cause in `why`; a function of its own so that nothing lives across longjmp
static int decode(const u8 *b, size_t n, Plan *p, int x0, int y0, int denom, char *why) {
    struct jpeg_decompress_struct c;
    Errors e;
    u8 *volatile row = NULL;
    int channels = p->channels;
    volatile int res = -1;
    memset(&c, 0, sizeof c);
    c.err = jpeg_std_error(&e.pub);
    e.pub.error_exit = fail; e.pub.emit_message = quiet;
    if (setjmp(e.jump)) { strcpy(why, e.why); goto end; }
    jpeg_create_decompress(&c);
    jpeg_mem_src(&c, b, n);
    c.src->fill_input_buffer = cut;
    jpeg_read_header(&c, TRUE);
    c.out_color_space = channels==1 ? JCS_GRAYSCALE : JCS_RGB;
    c.scale_num = 1; c.scale_denom = denom;
    if (channels==1 ? c.jpeg_color_space!=JCS_GRAYSCALE : c.jpeg_color_space!=JCS_YCbCr && c.jpeg_color_space!=JCS_GRAYSCALE && c.jpeg_color_space!=JCS_RGB) { strcpy(why, "colours of another kind"); goto end; }
    jpeg_start_decompress(&c);
    if (x0+p->w>(int)c.output_width || y0+p->h>(int)c.output_height) { strcpy(why, "no such region"); goto end; }
    int from = x0+p->need[0], to = x0+p->need[2];
    JDIMENSION at = from>2 ? from-2 : 0, end = to+2<(int)c.output_width ? (JDIMENSION)to+2 : c.output_width, wide = end-at;
    if (wide<c.output_width) jpeg_crop_scanline(&c, &at, &wide); else at = 0;
    row = malloc((size_t)c.output_width*channels+1+plan_slack(p));   // the width that jpeg_crop_scanline left
    if (!row) { strcpy(why, "no memory"); goto end; }
    if (y0+p->need[1]) jpeg_skip_scanlines(&c, y0+p->need[1]);
    JSAMPROW rows[1] = {row+1};   // what is aligned libjpeg-turbo writes past the cache
    for (int y=p->need[1]; y<p->need[3]; y++) { jpeg_read_scanlines(&c, rows, 1); plan_row(p, y, rows[0]+((ptrdiff_t)x0-(ptrdiff_t)at)*channels); }
    plan_finish(p);
    jpeg_abort_decompress(&c);
    res = 0;
end:
    jpeg_destroy_decompress(&c);
    free(row);
    return res;
}

static PyObject *read_(PyObject *self, PyObject *args) {
    Py_buffer b, out;
    Plan p;
    int r[4], denom, res = -1;
    char why[JMSG_LENGTH_MAX] = "no memory";
    memset(&p, 0, sizeof p);
    if (!PyArg_ParseTuple(args, "y*w*ii" PLAN_FORMAT, &b, &out, &denom, &p.channels, PLAN_ARGS(r, p))) return NULL;
    if (!plan_fits(&p, r, &out) || (denom!=1 && denom!=2 && denom!=4 && denom!=8)) strcpy(why, "what is asked for does not fit");
    else {
        Py_BEGIN_ALLOW_THREADS
        if (!plan_make(&p)) res = decode(b.buf, b.len, &p, r[0], r[1], denom, why);
        plan_free(&p);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&b); PyBuffer_Release(&out);
    if (res) { PyErr_SetString(PyExc_ValueError, why); return NULL; }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"read", read_, METH_VARARGS, "read(data, out, denom, channels, region, box, size, bicubic, cut, turn, down): of a JPEG at 1/denom, to buffer `out`"}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jpeg", NULL, -1, methods};
PyMODINIT_FUNC PyInit__jpeg(void) { return PyModule_Create(&module); }
