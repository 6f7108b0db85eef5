// Part of a JPEG: jpeg_skip_scanlines and jpeg_crop_scanline of libjpeg-turbo, which undo only what is needed of the rows and columns asked for
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>
#include <jerror.h>

typedef struct { struct jpeg_error_mgr pub; jmp_buf jump; char why[JMSG_LENGTH_MAX]; } Errors;

static void fail(j_common_ptr c) { Errors *e = (Errors*)c->err; e->pub.format_message(c, e->why); longjmp(e->jump, 1); }
static void quiet(j_common_ptr c, int level) { if (level<0) c->err->num_warnings++; }
static boolean cut(j_decompress_ptr c) { ERREXIT(c, JERR_INPUT_EOF); return FALSE; }

// 0, or -1 with the cause in `why`; a function of its own so that nothing lives across longjmp
static int decode(const unsigned char *b, size_t n, unsigned char *out, int x0, int y0, int x1, int y1, int denom, int channels, char *why) {
    struct jpeg_decompress_struct c;
    Errors e;
    unsigned char *volatile row = NULL;
    memset(&c, 0, sizeof c);
    c.err = jpeg_std_error(&e.pub);
    e.pub.error_exit = fail; e.pub.emit_message = quiet;
    if (setjmp(e.jump)) { strcpy(why, e.why); jpeg_destroy_decompress(&c); free(row); return -1; }
    jpeg_create_decompress(&c);
    jpeg_mem_src(&c, b, n);
    c.src->fill_input_buffer = cut;
    jpeg_read_header(&c, TRUE);
    c.out_color_space = channels==1 ? JCS_GRAYSCALE : JCS_RGB;
    c.scale_num = 1; c.scale_denom = denom;
    if (channels==1 ? c.jpeg_color_space!=JCS_GRAYSCALE : c.jpeg_color_space!=JCS_YCbCr && c.jpeg_color_space!=JCS_GRAYSCALE && c.jpeg_color_space!=JCS_RGB) { strcpy(why, "colours of another kind"); jpeg_destroy_decompress(&c); return -1; }
    jpeg_start_decompress(&c);
    if (x1>(int)c.output_width || y1>(int)c.output_height) { strcpy(why, "no such region"); jpeg_destroy_decompress(&c); return -1; }
    JDIMENSION at = x0>2 ? x0-2 : 0, end = x1+2<(int)c.output_width ? x1+2 : c.output_width, wide = end-at;
    if (wide<c.output_width) jpeg_crop_scanline(&c, &at, &wide); else at = 0;
    row = malloc((size_t)c.output_width*channels);   // the width that jpeg_crop_scanline left
    if (!row) { strcpy(why, "no memory"); jpeg_destroy_decompress(&c); return -1; }
    if (y0) jpeg_skip_scanlines(&c, y0);
    size_t line = (size_t)(x1-x0)*channels, skip = (size_t)(x0-at)*channels;
    JSAMPROW rows[1] = {row};
    for (int y=y0; y<y1; y++) { jpeg_read_scanlines(&c, rows, 1); memcpy(out+line*(y-y0), row+skip, line); }
    jpeg_abort_decompress(&c);
    jpeg_destroy_decompress(&c);
    free(row);
    return 0;
}

static PyObject *region(PyObject *self, PyObject *args) {
    Py_buffer b, out;
    int x0, y0, x1, y1, denom = 1, channels = 3, res;
    char why[JMSG_LENGTH_MAX] = "";
    if (!PyArg_ParseTuple(args, "y*w*(iiii)|ii", &b, &out, &x0, &y0, &x1, &y1, &denom, &channels)) return NULL;
    if (x0<0 || y0<0 || x1<=x0 || y1<=y0 || (denom!=1 && denom!=2 && denom!=4 && denom!=8) || (channels!=1 && channels!=3) || out.len<(Py_ssize_t)(x1-x0)*(y1-y0)*channels) { PyBuffer_Release(&b); PyBuffer_Release(&out); PyErr_SetString(PyExc_ValueError, "a region that does not fit"); return NULL; }
    Py_BEGIN_ALLOW_THREADS
    res = decode(b.buf, b.len, out.buf, x0, y0, x1, y1, denom, channels, why);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&b); PyBuffer_Release(&out);
    if (res) { PyErr_SetString(PyExc_ValueError, why); return NULL; }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"region", region, METH_VARARGS, "region(data, out, (x0,y0,x1,y1), denom=1, channels=3): write that part of a JPEG, scaled by 1/denom, to buffer `out`"}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jpeg", NULL, -1, methods};
PyMODINIT_FUNC PyInit__jpeg(void) { return PyModule_Create(&module); }
