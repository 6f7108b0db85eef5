// Pixels: resized as Pillow does, drawn as 01b_rasterise.ipynb does
#include "resample.h"

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

// Drawings, as _Pen in 01b_rasterise.ipynb: the same numbers in the same order, so the same bits
typedef struct { float r, R, scale, along; int size, shift, one, antialias, channels, rows; } Pen;

typedef int16_t v8 __attribute__((vector_size(16)));
typedef uint16_t v8u __attribute__((vector_size(16)));
typedef u8 v8b __attribute__((vector_size(8)));

static int up(float v) { int i = (int)v; return i+(v>(float)i); }   // ceil

// Ink `k` to `n` pixels, `step` apart
static inline void ink(const Pen *pen, u8 *out, ptrdiff_t at, ptrdiff_t step, const u8 *k, int n, const u8 *colour) {
    if (!colour) { out += at; for (int j=0; j<n; j++, out+=step) *out = *out<k[j] ? k[j] : *out; return; }
    for (int j=0; j<n; j++) for (int c=0; c<pen->channels; c++) {
        u8 *o = out+(at+j*step)*pen->channels+c, w = (u8)(k[j]*colour[c]/255);
        if (*o<w) *o = w;
    }
}

static void disc(const Pen *pen, u8 *out, float px, float py, const u8 *colour) {
    float R = pen->R, r = pen->r;
    int x = up(px-R), y = up(py-R), n = (int)(2*R)+1, from = x<0 ? -x : 0, to = x+n>pen->size ? pen->size-x : n;
    for (int j=0; j<n; j++) {
        float dy = (float)y-py+(float)j;
        u8 k[288];
        if (y+j<0 || y+j>=pen->size || from>=to) continue;
        dy *= dy;
        for (int i=0; i<n; i+=8) for (int q=i; q<i+8; q++) {
            float dx = (float)x-px+(float)q, d = sqrtf(dy+dx*dx), v = R-d;
            v = v<0 ? 0 : v;
            v = v>1 ? 1 : v;
            k[q] = pen->antialias ? (u8)(int)(v*255) : d<=r ? 255 : 0;
        }
        ink(pen, out, (ptrdiff_t)(y+j)*pen->size+x+from, 1, k+from, to-from, colour);
    }
}

static void segment(const Pen *pen, u8 *out, const float *from, const float *to, const u8 *colour) {
    static const v8u J = {0,1,2,3,4,5,6,7};   // unsigned where it may wrap, as NumPy does
    float R = pen->R, one = (float)pen->one, along = pen->along;
    int steep = fabsf(to[1]-from[1])>fabsf(to[0]-from[0]), size = pen->size, rows = pen->rows;
    float u = from[steep], v = from[!steep], du = to[steep]-u, dv = to[!steep]-v;
    if (du<0) { u += du; v += dv; dv = -dv; du = -du; }
    float l = sqrtf(du*du+dv*dv);
    if (!(l>0)) return;   // so short that its square is zero
    float c = du/l, s = dv/l, a = ceilf(u-R*fabsf(s));
    int cols = (int)(floorf(u+du+R*fabsf(s))-a+1), first = (int)a;
    ptrdiff_t du_ = steep ? size : 1, dv_ = steep ? 1 : size;
    float low0 = v-R/c+(a-u)*s/c, slope = s/c, C = c*one, S = s*along, t0 = (a-u-R*s)/c*along, tc = along/c;
    const int16_t rc = (int16_t)rintf(C), rs = (int16_t)rintf(S), far = (int16_t)(R*one), near = (int16_t)(pen->r*one), most = (int16_t)pen->one;
    const uint16_t end = (uint16_t)(l*along);
    const v8 some = J<(uint16_t)(rows<8 ? rows : 8);
    int shift = pen->shift, soft = pen->antialias;
    for (int i=0; i<cols; i++) {
        float low = low0+(float)i*slope, t = t0+(float)i*tc;
        int row = up(low), j0 = row<0 ? -row : 0, j1 = row+rows>size ? size-row : rows;
        if (first+i<0 || first+i>=size || j0>=j1) continue;
        u8 k[384];
        low = (float)row-low;
        t += low*S;
        v8u d = J*(uint16_t)rc+(uint16_t)(int16_t)(low*C-R*one), e = J*(uint16_t)rs+(uint16_t)(int16_t)t;
        for (int b=0; b<rows; b+=8, d+=(uint16_t)(8*rc), e+=(uint16_t)(8*rs)) {   // from the line, and along it
            v8 less = (v8)d<0, m = (v8)((d^(v8u)less)-(v8u)less);
            if (soft) { m = (v8)((uint16_t)far-(v8u)m); m &= m>0; less = m<most; m = (m&less)|(most&~less); m >>= shift; }
            else m = (m<=near)&255;
            m &= some & (v8)(e<=end);
            v8b r = __builtin_convertvector(m, v8b);
            memcpy(k+b, &r, 8);
        }
        u8 *o = out+(ptrdiff_t)(first+i)*du_+(ptrdiff_t)row*dv_;
        if (colour || j0 || rows>8 || row+8>size) ink(pen, out, (first+i)*du_+(row+j0)*dv_, dv_, k+j0, j1-j0, colour);
        else if (steep) for (int j=0; j<8; j++) o[j] = o[j]<k[j] ? k[j] : o[j];
        else for (int j=0; j<8; j++) o[j*size] = o[j*size]<k[j] ? k[j] : o[j*size];
    }
}

// -1: no strokes, or they are damaged, or there are no colours left
static int drawing(const Pen *pen, const u8 *b, size_t n, u8 *out, const u8 **colour, const u8 *colours_end) {
    int low[2] = {255, 255}, high[2] = {0, 0};
    for (int pass=0; pass<2; pass++) {
        float off[2] = {0, 0};
        for (int q=0; pass && q<2; q++) off[q] = (float)(127-(low[q]+high[q])/2);
        size_t i = 0;
        if (!n) return -1;
        while (i<n) {
            size_t m = 0;
            int bits = 0;
            do { if (i>=n || bits>28) return -1; m |= (size_t)(b[i]&127)<<bits; bits += 7; } while (b[i++]&128);
            if (!m || (bits>7 && !b[i-1]) || 2*m>n-i) return -1;
            const u8 *xy[2] = {b+i, b+i+m};
            i += 2*m;
            if (!pass) { for (int q=0; q<2; q++) for (size_t j=0; j<m; j++) { if (xy[q][j]<low[q]) low[q] = xy[q][j]; if (xy[q][j]>high[q]) high[q] = xy[q][j]; } continue; }
            const u8 *ink_ = NULL;
            if (*colour) { if (*colour+pen->channels>colours_end) return -1; ink_ = *colour; *colour += pen->channels; }
            float p[2], last[2] = {0, 0}, add = pen->r-.5f;
            for (size_t j=0; j<m; j++) {
                for (int q=0; q<2; q++) p[q] = ((float)xy[q][j]+off[q])*pen->scale+add;
                disc(pen, out, p[0], p[1], ink_);
                if (j && (p[0]!=last[0] || p[1]!=last[1])) segment(pen, out, last, p, ink_);
                memcpy(last, p, sizeof p);
            }
        }
    }
    return 0;
}

static PyObject *draw(PyObject *self, PyObject *args) {
    PyObject *list;
    Py_buffer out, inks = {0};
    Pen pen;
    if (!PyArg_ParseTuple(args, "O!w*ifffipiz*", &PyList_Type, &list, &out, &pen.size, &pen.r, &pen.R, &pen.scale, &pen.shift, &pen.antialias, &pen.channels, &inks)) return NULL;
    Py_ssize_t n = PyList_Size(list), bad = -1;
    char **bs = malloc(sizeof(char*)*(n+1));
    Py_ssize_t *ns = malloc(sizeof(Py_ssize_t)*(n+1));
    int ok = bs && ns && pen.size>=8 && pen.size<=4096 && pen.R>0 && pen.R<=130 && pen.r>=-1 && pen.r<=pen.R && pen.scale>=0 && pen.scale*255<=(float)pen.size && pen.shift>=0 && pen.shift<8 && (pen.R+2)*(float)(255<<pen.shift)<=32767 && (pen.channels==1 || pen.channels==3) && out.len==n*pen.size*pen.size*pen.channels;
    for (Py_ssize_t i=0; ok && i<n; i++) ok = !PyBytes_AsStringAndSize(PyList_GetItem(list, i), bs+i, ns+i);
    if (ok) {
        pen.one = 255<<pen.shift; pen.along = (float)(20000./pen.size); pen.rows = (int)(2.83*(double)pen.R)+1;
        const u8 *colour = inks.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i=0; i<n && bad<0; i++)
{
            size_t one = (size_t)pen.size*pen.size*pen.channels;
            memset((u8*)out.buf+i*one, 0, one);   // now, so that it is in the cache
            if (drawing(&pen, (u8*)bs[i], ns[i], (u8*)out.buf+i*one, &colour, (u8*)inks.buf+inks.len)) bad = i;
        }
        Py_END_ALLOW_THREADS
    }
    free(bs); free(ns);
    PyBuffer_Release(&out);
    if (inks.buf) PyBuffer_Release(&inks);
    if (PyErr_Occurred()) return NULL;
    if (!ok || bad>=0) { if (ok) PyErr_Format(PyExc_ValueError, "drawing %zd is damaged", bad); else PyErr_SetString(PyExc_ValueError, "what is asked for does not fit"); return NULL; }
    Py_RETURN_NONE;
}

static PyObject *floats(PyObject *self, PyObject *args) {
    Py_buffer b, out;
    Py_ssize_t plane, copies;
    float div;
    if (!PyArg_ParseTuple(args, "y*w*nnf", &b, &out, &plane, &copies, &div)) return NULL;
    int ok = plane>0 && copies>0 && b.len%plane==0;
    if (b.len==0) ok = ok && out.len==0;
    else ok = ok && copies==out.len/4/b.len && out.len==b.len*copies*4;   // in this order, so that the product cannot overflow
    if (ok) {
        PyThreadState *state = b.len<1<<16 ? NULL : PyEval_SaveThread();   // giving it up takes longer than a few bytes
        const u8 *s = b.buf;
        float *o = out.buf;
        for (Py_ssize_t k=b.len/plane; k; k--, s+=plane, o+=plane*copies) {
            float *restrict p = o, *restrict q = o+plane, *restrict r = o+2*plane;
            if (copies==3) for (Py_ssize_t i=0; i<plane; i++) { float v = (float)s[i]/div; p[i] = v; q[i] = v; r[i] = v; }
            else {
                for (Py_ssize_t i=0; i<plane; i++) p[i] = (float)s[i]/div;
                for (Py_ssize_t c=1; c<copies; c++) memcpy(o+c*plane, o, plane*4);
            }
        }
        if (state) PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&b); PyBuffer_Release(&out);
    if (!ok) { PyErr_SetString(PyExc_ValueError, "floats: the output is not 4 * copies * len(pixels) bytes, or the pixels are not whole planes"); return NULL; }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"floats", floats, METH_VARARGS, "floats(pixels, out, plane, copies, div): bytes to floats over `div`, each plane of them `copies` times"},
    {"read", read_, METH_VARARGS, "read(pixels, out, width, channels, region, box, size, bicubic, cut, turn, down): of an array (height, width, channels), to buffer `out`"},
    {"draw", draw, METH_VARARGS, "draw(drawings, out, size, r, R, scale, shift, antialias, channels, inks): a list of packed strokes, white on black, to buffer `out`; `inks` has bytes for each stroke and channel, or is None"},
    {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pixels", NULL, -1, methods};
PyMODINIT_FUNC PyInit__pixels(void) { return PyModule_Create(&module); }
