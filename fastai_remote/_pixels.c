// What is done to pixels: resized as Pillow does
#include "_resample.h"

static PyObject *read_(PyObject *self, PyObject *args) {
    Py_buffer b, out;
    Plan p;
    int r[4], wide, res = -1;
    memset(&p, 0, sizeof p);
    if (!PyArg_ParseTuple(args, "y*w*ii" PLAN_FORMAT, &b, &out, &wide, &p.channels, PLAN_ARGS(r, p))) return NULL;
    int fits = plan_fits(&p, r, &out) && r[2]<=wide && (Py_ssize_t)r[3]*wide*p.channels<=b.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        size_t line = (size_t)wide*p.channels, used = (size_t)p.w*p.channels;
        u8 *last = NULL;   // a row, after the end of which nothing may be read
        if (!plan_make(&p) && (last = malloc(used+plan_slack(&p)))) {
            const u8 *in = (const u8*)b.buf+(size_t)r[1]*line+(size_t)r[0]*p.channels, *end = (const u8*)b.buf+b.len;
            for (int y=p.need[1]; y<p.need[3]; y++) {
                const u8 *row = in+y*line;
                if (end-row<(ptrdiff_t)(used+plan_slack(&p))) { memcpy(last, row, used); row = last; }
                plan_row(&p, y, row);
            }
            plan_finish(&p);
            res = 0;
        }
        plan_free(&p); free(last);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&b); PyBuffer_Release(&out);
    if (res) { PyErr_SetString(PyExc_ValueError, fits ? "no memory" : "what is asked for does not fit"); return NULL; }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"read", read_, METH_VARARGS, "read(pixels, out, width, channels, region, box, size, bicubic, cut, turn, down): of an array (height, width, channels), to buffer `out`"}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pixels", NULL, -1, methods};
PyMODINIT_FUNC PyInit__pixels(void) { return PyModule_Create(&module); }
