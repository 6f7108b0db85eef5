// A region of a picture resized, cropped and turned on its way into a tensor of shape (channels, height, width)
// The filters, and every bit of what they give, are those of Pillow's Resample.c: 22 bits of weight, rounded to bytes in between
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(NO_AVX2)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#endif

typedef unsigned char u8;

// Of each place: its first pixel, how many; their weights, 256*hi+lo of 2^22, zeros to `wide` of them. Places are made up to a multiple of 4
typedef struct { int *first, *taps, wide; int16_t *hi, *lo; } Filter;

typedef struct {
    int w, h, channels;         // the region
    float box[4];               // of it
    int tw, th, bicubic;        // the size that becomes of the box
    int cut[4];                 // of that
    int turn, fx, fy;           // transposed, then flipped
    int down;                   // columns first? It rounds otherwise
    u8 *out;
    Filter x, y;
    int need[4], fast;          // what of the region: x0, y0, x1, y1
    u8 *tmp, *line, *flat; size_t step;
} Plan;

static int has_avx2(void) {
#ifdef AVX2
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

static double bilinear(double x) { x = fabs(x); return x<1 ? 1-x : 0; }
static double bicubic(double x) { const double a = -.5; x = fabs(x); return x<1 ? ((a+2)*x-(a+3))*x*x+1 : x<2 ? (((x-5)*x+8)*x-4)*a : 0; }
static u8 clip(int v) { v >>= 22; return v<0 ? 0 : v>255 ? 255 : (u8)v; }

static void filter_free(Filter *f) { free(f->first); free(f->taps); free(f->hi); free(f->lo); memset(f, 0, sizeof *f); }

// For places a to b of `n`, or back, made of in0 to in1 of `size` pixels; none at all where they are those pixels. -1: no memory
static int filter_make(Filter *f, int size, float in0, float in1, int n, int cubic, int a, int b, int back) {
    memset(f, 0, sizeof *f);
    if (n==size && in0==0 && in1==(float)size) return 0;
    double scale = (double)(in1-in0)/n, wide = scale<1 ? 1 : scale, reach = (cubic ? 2. : 1.)*wide, inv = 1/wide;
    size_t places = ((size_t)(b-a)+3)&~(size_t)3;
    double *k = malloc(sizeof(double)*((size_t)ceil(reach)*2+1));
    f->first = calloc(places, sizeof(int)); f->taps = calloc(places, sizeof(int));
    for (int i=a; f->first && f->taps && i<b; i++) {
        double mid = in0+(i+.5)*scale;
        int from = (int)(mid-reach+.5), to = (int)(mid+reach+.5), at = back ? b-1-i : i-a;
        if (from<0) from = 0;
        if (to>size) to = size;
        f->first[at] = from; f->taps[at] = to-from;
        if (to-from>f->wide) f->wide = to-from;
    }
    size_t w = f->wide = (f->wide+3)&~3;
    f->hi = calloc(places*w, 2); f->lo = calloc(places*w, 2);
    if (!k || !f->first || !f->taps || !f->hi || !f->lo) { free(k); filter_free(f); return -1; }
    for (int i=a; i<b; i++) {
        double mid = in0+(i+.5)*scale, sum = 0;
        int at = back ? b-1-i : i-a, from = f->first[at], m = f->taps[at];
        for (int j=0; j<m; j++) { double v = (j+from-mid+.5)*inv; k[j] = cubic ? bicubic(v) : bilinear(v); sum += k[j]; }
        for (int j=0; j<m; j++) {
            double v = (sum!=0 ? k[j]/sum : k[j])*(1<<22);
            int q = (int)(v<0 ? v-.5 : v+.5);
            f->hi[at*w+j] = (int16_t)(q>>8); f->lo[at*w+j] = (int16_t)(q&255);
        }
    }
    for (size_t i=b-a; i<places; i++) f->first[i] = f->first[b-a-1];
    free(k);
    return 0;
}

static void plan_free(Plan *p) { filter_free(&p->x); filter_free(&p->y); free(p->tmp); free(p->line); free(p->flat); p->tmp = p->line = p->flat = NULL; }

// Bytes after a row that may be read
static size_t plan_slack(const Plan *p) { return 3*(size_t)p->x.wide+32; }

static int plan_make(Plan *p) {   // -1: no memory
    int w = p->cut[2]-p->cut[0], h = p->cut[3]-p->cut[1], back = p->turn ? p->fy : p->fx;
    if (filter_make(&p->x, p->w, p->box[0], p->box[2], p->tw, p->bicubic, p->cut[0], p->cut[2], back)) return -1;
    if (filter_make(&p->y, p->h, p->box[1], p->box[3], p->th, p->bicubic, p->cut[1], p->cut[3], 0)) return -1;
    Filter *x = &p->x, *y = &p->y;
    int l = back ? w-1 : 0, r = w-1-l;   // the places at the left and right
    p->need[0] = x->first ? x->first[l] : p->cut[0]; p->need[2] = x->first ? x->first[r]+x->taps[r] : p->cut[2];
    p->need[1] = y->first ? y->first[0] : p->cut[1]; p->need[3] = y->first ? y->first[h-1]+y->taps[h-1] : p->cut[3];
    p->fast = has_avx2();
    size_t n = p->channels, flat = ((size_t)w+31)&~(size_t)31;
    p->step = p->down ? ((p->need[2]-p->need[0])*n+31)&~(size_t)31 : flat;
    p->tmp = malloc(p->step*(p->down ? 1 : n)*(p->need[3]-p->need[1]+1)+plan_slack(p));
    p->line = malloc(p->step+plan_slack(p)); p->flat = malloc(flat*n);
    return p->tmp && p->line && p->flat ? 0 : -1;
}

#ifdef AVX2
// All places of a row of three channels, whose pixel 0 would be at `in`; inlined for the usual `wide`
AVX2 static inline __attribute__((always_inline)) void across_(const Filter *f, int w, const u8 *in, u8 *o, size_t plane, int wide) {
    const __m256i zero = _mm256_setzero_si256(), both = _mm256_setr_epi32(0,0,0,0,1,1,1,1), half = _mm256_set1_epi32(1<<21);
    const __m256i spread = _mm256_setr_epi8(0,-1,3,-1, 1,-1,4,-1, 2,-1,5,-1, -1,-1,-1,-1, 6,-1,9,-1, 7,-1,10,-1, 8,-1,11,-1, -1,-1,-1,-1);
    const __m128i planes = _mm_setr_epi8(0,4,8,12, 1,5,9,13, 2,6,10,14, 3,7,11,15);
    const int16_t *hi = f->hi, *lo = f->lo;
    for (int i=0; i<w; i+=4) {
        __m256i t[4];
#pragma GCC unroll 4
        for (int e=0; e<4; e++) {
            const u8 *s = in+(ptrdiff_t)f->first[i+e]*3;
            __m256i h = zero, l = zero;
            for (int j=0; j<wide; j+=4, s+=12, hi+=4, lo+=4) {   // four pixels: red, red, green, green, blue, blue, and the next two
                __m256i v = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)s)), spread);
                h = _mm256_add_epi32(h, _mm256_madd_epi16(v, _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i*)hi)), both)));
                l = _mm256_add_epi32(l, _mm256_madd_epi16(v, _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i*)lo)), both)));
            }
            t[e] = _mm256_add_epi32(_mm256_slli_epi32(h, 8), l);
        }
        __m256i a = _mm256_add_epi32(_mm256_permute2x128_si256(t[0], t[1], 0x20), _mm256_permute2x128_si256(t[0], t[1], 0x31));
        __m256i b = _mm256_add_epi32(_mm256_permute2x128_si256(t[2], t[3], 0x20), _mm256_permute2x128_si256(t[2], t[3], 0x31));
        a = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(a, half), 22), _mm256_srai_epi32(_mm256_add_epi32(b, half), 22));
        a = _mm256_packus_epi16(a, a);
        __m128i c = _mm_shuffle_epi8(_mm_unpacklo_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)), planes);
        int v[3] = {_mm_cvtsi128_si32(c), _mm_extract_epi32(c, 1), _mm_extract_epi32(c, 2)};
        for (int k=0; k<3; k++) memcpy(o+k*plane+i, v+k, 4);
    }
}

AVX2 static void across3(const Filter *f, int w, const u8 *in, u8 *o, size_t plane) {
    if (f->wide==4) across_(f, w, in, o, plane, 4);
    else if (f->wide==8) across_(f, w, in, o, plane, 8);
    else across_(f, w, in, o, plane, f->wide);
}

// A row of `n` bytes, of `m` rows of `step` bytes from `s` on
AVX2 static void down32(const int16_t *hi, const int16_t *lo, int m, const u8 *s, size_t step, size_t n, u8 *line) {
    const __m256i zero = _mm256_setzero_si256();
    for (size_t x=0; x<n; x+=32) {
        __m256i h[4] = {zero, zero, zero, zero}, l[4];
        for (int q=0; q<4; q++) l[q] = _mm256_set1_epi32(1<<21);
        for (int j=0; j<m; j+=2) {   // two rows
            int kh, kl; memcpy(&kh, hi+j, 4); memcpy(&kl, lo+j, 4);
            __m256i a = _mm256_loadu_si256((const __m256i*)(s+j*step+x)), b = j+1<m ? _mm256_loadu_si256((const __m256i*)(s+(j+1)*step+x)) : zero;
            __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpackhi_epi8(a, b), wh = _mm256_set1_epi32(kh), wl = _mm256_set1_epi32(kl);
            __m256i v[4] = {_mm256_unpacklo_epi8(ab, zero), _mm256_unpackhi_epi8(ab, zero), _mm256_unpacklo_epi8(cd, zero), _mm256_unpackhi_epi8(cd, zero)};
            for (int q=0; q<4; q++) { h[q] = _mm256_add_epi32(h[q], _mm256_madd_epi16(v[q], wh)); l[q] = _mm256_add_epi32(l[q], _mm256_madd_epi16(v[q], wl)); }
        }
        for (int q=0; q<4; q++) l[q] = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h[q], 8), l[q]), 22);
        _mm256_storeu_si256((__m256i*)(line+x), _mm256_packus_epi16(_mm256_packs_epi32(l[0], l[1]), _mm256_packs_epi32(l[2], l[3])));
    }
}
#endif

// The places of a row, whose pixel 0 would be at `in`, to `channels` planes
static void across(const Plan *p, const u8 *in, u8 *o, size_t plane) {
    const Filter *f = &p->x;
    int w = p->cut[2]-p->cut[0], n = p->channels, back = p->turn ? p->fy : p->fx;
    if (!f->first) {
        in += (ptrdiff_t)p->cut[0]*n;
        if (n==1 && !back) memcpy(o, in, w);
        else for (int c=0; c<n; c++, o+=plane) for (int i=0; i<w; i++) o[i] = in[(ptrdiff_t)(back ? w-1-i : i)*n+c];
        return;
    }
#ifdef AVX2
    if (n==3 && p->fast) { across3(f, w, in, o, plane); return; }
#endif
    for (int i=0; i<w; i++, o++) {
        const int16_t *hi = f->hi+(size_t)i*f->wide, *lo = f->lo+(size_t)i*f->wide;
        const u8 *s = in+(ptrdiff_t)f->first[i]*n;
        int m = f->taps[i], a = 1<<21, b = a, c = a;
        if (n==3) for (int j=0; j<m; j++, s+=3) { int k = hi[j]*256+lo[j]; a += s[0]*k; b += s[1]*k; c += s[2]*k; }
        else for (int j=0; j<m; j++) a += s[j]*(hi[j]*256+lo[j]);
        *o = clip(a);
        if (n==3) { o[plane] = clip(b); o[2*plane] = clip(c); }
    }
}

// Row `i` of `n` bytes, of rows of `step` bytes from `rows` on: in `line`, or where it is already
static const u8 *down(const Plan *p, int i, const u8 *rows, size_t step, size_t n) {
    const Filter *f = &p->y;
    if (!f->first) return rows+(size_t)i*step;
    const int16_t *hi = f->hi+(size_t)i*f->wide, *lo = f->lo+(size_t)i*f->wide;
    const u8 *s = rows+(size_t)(f->first[i]-p->need[1])*step;
    int m = f->taps[i], v[64];
#ifdef AVX2
    if (p->fast) { down32(hi, lo, m, s, step, n, p->line); return p->line; }
#endif
    for (size_t x=0; x<n; x+=64) {
        int k = n-x<64 ? (int)(n-x) : 64;
        for (int q=0; q<64; q++) v[q] = 1<<21;
        for (int j=0; j<m; j++) { int a = hi[j]*256+lo[j]; const u8 *r = s+j*step+x; for (int q=0; q<k; q++) v[q] += r[q]*a; }
        for (int q=0; q<k; q++) p->line[x+q] = clip(v[q]);
    }
    return p->line;
}

// Row `y` of the region, whose pixel 0 would be at `in`; `plan_slack` bytes after its last one may be read
static void plan_row(Plan *p, int y, const u8 *in) {
    size_t n = p->channels, k = y-p->need[1];
    if (p->down) memcpy(p->tmp+k*p->step, in+(ptrdiff_t)(p->need[0]*n), (p->need[2]-p->need[0])*n);
    else across(p, in, p->tmp+k*p->step*n, p->step);
}

// When all rows of `need` have been given: to the tensor
static void plan_finish(Plan *p) {
    int w = p->cut[2]-p->cut[0], h = p->cut[3]-p->cut[1], n = p->channels, up = p->turn ? p->fx : p->fy;
    size_t flat = ((size_t)w+31)&~(size_t)31;
    for (int i=0; i<h; i++) {
        int at = up ? h-1-i : i;
        u8 *o = p->out+(p->turn ? (size_t)at : (size_t)at*w);
        if (p->down) across(p, down(p, i, p->tmp, p->step, (size_t)(p->need[2]-p->need[0])*n)-(ptrdiff_t)p->need[0]*n, p->flat, flat);
        for (int c=0; c<n; c++, o+=(size_t)w*h) {
            const u8 *s = p->down ? p->flat+c*flat : down(p, i, p->tmp+c*p->step, p->step*n, w);
            if (!p->turn) memcpy(o, s, w);
            else for (int x=0; x<w; x++) o[(size_t)x*h] = s[x];
        }
    }
}

// What both modules take after their sources: region, box, size, bicubic, cut, (transposed, flipped in x, in y), down
#define PLAN_FORMAT "(iiii)(ffff)(ii)p(iiii)(ppp)p"
#define PLAN_ARGS(r, p) r, r+1, r+2, r+3, (p).box, (p).box+1, (p).box+2, (p).box+3, &(p).tw, &(p).th, &(p).bicubic, (p).cut, (p).cut+1, (p).cut+2, (p).cut+3, &(p).turn, &(p).fx, &(p).fy, &(p).down

static int plan_fits(Plan *p, const int *r, const Py_buffer *out) {   // and what it can be told so far
    if (r[0]<0 || r[1]<0 || r[2]<=r[0] || r[3]<=r[1] || r[2]>65535 || r[3]>65535) return 0;
    p->w = r[2]-r[0]; p->h = r[3]-r[1];
    if (!(p->box[0]>=0 && p->box[1]>=0 && p->box[2]>p->box[0] && p->box[3]>p->box[1] && p->box[2]<=p->w && p->box[3]<=p->h)) return 0;
    if (p->tw<1 || p->th<1 || p->tw>65535 || p->th>65535) return 0;
    if (p->cut[0]<0 || p->cut[1]<0 || p->cut[2]<=p->cut[0] || p->cut[3]<=p->cut[1] || p->cut[2]>p->tw || p->cut[3]>p->th) return 0;
    p->out = out->buf;
    return (p->channels==1 || p->channels==3) && out->len==(Py_ssize_t)(p->cut[2]-p->cut[0])*(p->cut[3]-p->cut[1])*p->channels;
}
