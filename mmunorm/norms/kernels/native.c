/* What the reference computes, for contiguous float32 on a CPU, one pass over the tokens each; and the
   per-channel part of a training step, which in torch is some fifty operators.

   x, dy, y, dx are (tokens, channels). Sums over tokens are in float32 for BLOCK tokens and in double over
   those: the same input and number of threads give the same bits. Functions with an int return 1 where
   memory is short, else 0. setup.py builds this file; native.py loads it and says what each argument is. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#ifdef __ELF__
#pragma GCC visibility push(protected) /* libc has an `advance` too, which calls from here must not reach */
#endif

/* The widest vectors of the machine that runs it, not of the one that built it. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((noinline, target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define VECTORIZED
#endif
#define ALWAYS __attribute__((always_inline))

typedef ptrdiff_t size;

enum { BLOCK = 64, ROWS = 8 };                   /* tokens: in float32, and at once */
enum { LEAST_WORK = 1 << 14 };                   /* elements that are worth a thread */
enum { CURRENT, GM, AM, EMA, EARLIER_EMA, NU };  /* averages, in the order of native.py */

/* A checksum of this file, by which native.py knows a library of another version. */
unsigned native_source(void) { return SOURCE; }

static size smaller(size a, size b) { return a < b ? a : b; }

static size larger(size a, size b) { return a < b ? b : a; }

static int useful(int threads, size elements)
{
    size most = elements / LEAST_WORK;
    return most < 1 ? 1 : (int)smaller(threads, most);
}

/* Where a thread's share of the tokens ends, and the next one's begins. */
static size share_end(size tokens, size thread) { return tokens * (thread + 1) / omp_get_num_threads(); }

/* ---- sums over tokens, of several at once: more memory is under way, and sums are written less often ---- */

VECTORIZED static void add_values(const float *restrict x, size tokens, size channels, float *restrict sum)
{
    size t = 0;
    for (; t + ROWS <= tokens; t += ROWS, x += ROWS * channels)
        for (size c = 0; c < channels; c++) {
            float values = 0;
            #pragma GCC unroll 8
            for (size row = 0; row < ROWS; row++)
                values += x[row * channels + c];
            sum[c] += values;
        }
    for (; t < tokens; t++, x += channels)
        for (size c = 0; c < channels; c++)
            sum[c] += x[c];
}

static inline float square(float value) { return value * value; }

/* Made twice each below, with a mean and without, as the compiler does not vectorize one loop for both. */
static inline ALWAYS void sum_squares(const float *restrict x, const float *restrict mean, int centered,
                                      size tokens, size channels, float *restrict sum)
{
    size t = 0;
    for (; t + ROWS <= tokens; t += ROWS, x += ROWS * channels)
        for (size c = 0; c < channels; c++) {
            float squares = 0;
            #pragma GCC unroll 8
            for (size row = 0; row < ROWS; row++)
                squares += square(x[row * channels + c] - (centered ? mean[c] : 0));
            sum[c] += squares;
        }
    for (; t < tokens; t++, x += channels)
        for (size c = 0; c < channels; c++)
            sum[c] += square(x[c] - (centered ? mean[c] : 0));
}

static inline ALWAYS void sum_products(const float *restrict dy, const float *restrict x,
                                       const float *restrict mean, int centered, size tokens, size channels,
                                       float *restrict products, float *restrict sum)
{
    size t = 0;
    for (; t + ROWS <= tokens; t += ROWS, x += ROWS * channels, dy += ROWS * channels)
        for (size c = 0; c < channels; c++) {
            float product = 0, values = 0;
            #pragma GCC unroll 8
            for (size row = 0; row < ROWS; row++) {
                product += dy[row * channels + c] * (x[row * channels + c] - (centered ? mean[c] : 0));
                values += dy[row * channels + c];
            }
            products[c] += product;
            sum[c] += values;
        }
    for (; t < tokens; t++, x += channels, dy += channels)
        for (size c = 0; c < channels; c++) {
            products[c] += dy[c] * (x[c] - (centered ? mean[c] : 0));
            sum[c] += dy[c];
        }
}

/* `mean` may be NULL. */
VECTORIZED static void add_squares(const float *x, const float *mean, size tokens, size channels, float *sum)
{
    if (mean)
        sum_squares(x, mean, 1, tokens, channels, sum);
    else
        sum_squares(x, NULL, 0, tokens, channels, sum);
}

VECTORIZED static void add_products(const float *dy, const float *x, const float *mean, size tokens,
                                    size channels, float *products, float *sum)
{
    if (mean)
        sum_products(dy, x, mean, 1, tokens, channels, products, sum);
    else
        sum_products(dy, x, NULL, 0, tokens, channels, products, sum);
}

/* Moves what a block has summed into the sum over blocks. */
VECTORIZED static void carry(float *restrict part, double *restrict whole, size count)
{
    for (size i = 0; i < count; i++) {
        whole[i] += part[i];
        part[i] = 0;
    }
}

/* A thread's part of the work: sums[0..count) over its blocks' tokens. */
typedef struct {
    const float *x, *dy, *mean;
    size tokens, channels;
} work;

typedef void summand(const work *, size first, size tokens, float *part);

/* `count` sums over tokens into `out`. */
static int reduce(summand *add, const work *job, size count, int threads, double *out)
{
    threads = useful(threads, job->tokens * job->channels);
    double *sums = calloc(threads * count, sizeof(double));
    float *parts = calloc(threads * count, sizeof(float));
    if (sums && parts) {
        #pragma omp parallel num_threads(threads) if (threads > 1)
        {
            size thread = omp_get_thread_num(), end = share_end(job->tokens, thread);
            for (size first = share_end(job->tokens, thread - 1); first < end; first += BLOCK) {
                add(job, first, smaller(BLOCK, end - first), parts + thread * count);
                carry(parts + thread * count, sums + thread * count, count);
            }
        }
        memset(out, 0, count * sizeof(double));
        for (int thread = 0; thread < threads; thread++)
            for (size i = 0; i < count; i++)
                out[i] += sums[thread * count + i];
    }
    int failed = !(sums && parts);
    free(sums);
    free(parts);
    return failed;
}

static void values_of(const work *job, size first, size tokens, float *part)
{
    add_values(job->x + first * job->channels, tokens, job->channels, part);
}

static void squares_of(const work *job, size first, size tokens, float *part)
{
    add_squares(job->x + first * job->channels, job->mean, tokens, job->channels, part);
}

static void products_of(const work *job, size first, size tokens, float *part)
{
    size start = first * job->channels;
    add_products(job->dy + start, job->x + start, job->mean, tokens, job->channels, part,
                 part + job->channels);
}

int second_moment(const float *x, size tokens, size channels, int threads, float *square)
{
    work job = {.x = x, .tokens = tokens, .channels = channels};
    double *sums = malloc(channels * sizeof(double));
    int failed = !sums || reduce(squares_of, &job, channels, threads, sums);
    for (size c = 0; !failed && c < channels; c++)
        square[c] = (float)(sums[c] / tokens);
    free(sums);
    return failed;
}

int variance_and_mean(const float *x, size tokens, size channels, int threads, float *variance, float *mean)
{
    work job = {.x = x, .mean = mean, .tokens = tokens, .channels = channels};
    double *sums = malloc(channels * sizeof(double));
    int failed = !sums || reduce(values_of, &job, channels, threads, sums);
    for (size c = 0; !failed && c < channels; c++)
        mean[c] = (float)(sums[c] / tokens);
    failed = failed || reduce(squares_of, &job, channels, threads, sums);
    for (size c = 0; !failed && c < channels; c++)
        variance[c] = (float)(sums[c] / tokens);
    free(sums);
    return failed;
}

/* reference.normalize_backward; `mean` and with it `g_mean` may be NULL. */
int normalize_backward(const float *dy, const float *x, const float *weight, const float *rstd,
                       const float *mean, size tokens, size channels, int threads, float *dweight,
                       float *dbias, float *g, float *g_mean)
{
    double *sums = malloc(2 * channels * sizeof(double));
    work job = {.x = x, .dy = dy, .mean = mean, .tokens = tokens, .channels = channels};
    int failed = !sums || reduce(products_of, &job, 2 * channels, threads, sums);
    for (size c = 0; !failed && c < channels; c++) {
        double share = (double)weight[c] / tokens, products = sums[c] * rstd[c], sum = sums[channels + c];
        dweight[c] = (float)products;
        dbias[c] = (float)sum;
        g[c] = (float)(products * share);
        if (g_mean)
            g_mean[c] = (float)(sum * share);
    }
    free(sums);
    return failed;
}

/* ---- elementwise passes, from the end: a sum over tokens has just left that in the cache ---- */

VECTORIZED static void scale_block(const float *restrict x, const float *restrict scale,
                                   const float *restrict shift, size tokens, size channels, float *restrict y)
{
    for (size t = 0; t < tokens; t++, x += channels, y += channels)
        for (size c = 0; c < channels; c++)
            y[c] = x[c] * scale[c] + shift[c];
}

VECTORIZED static void combine_block(const float *restrict dy, const float *restrict x,
                                     const float *restrict terms, size tokens, size channels,
                                     float *restrict dx)
{
    const float *direct = terms, *slope = terms + channels, *constant = terms + 2 * channels;
    for (size t = 0; t < tokens; t++, x += channels, dy += channels, dx += channels)
        for (size c = 0; c < channels; c++)
            dx[c] = dy[c] * direct[c] + (x[c] * slope[c] + constant[c]);
}

/* y = scale * x + shift */
void affine(const float *x, const float *scale, const float *shift, size tokens, size channels, int threads,
            float *y)
{
    threads = useful(threads, tokens * channels);
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        size thread = omp_get_thread_num(), start = share_end(tokens, thread - 1);
        for (size first, end = share_end(tokens, thread); end > start; end = first) {
            first = larger(start, end - BLOCK);
            scale_block(x + first * channels, scale, shift, end - first, channels, y + first * channels);
        }
    }
}

/* reference.normalize_input_gradient; `mean` and with it `g_mean`, and `eta`, may be NULL. */
int normalize_input_gradient(const float *dy, const float *x, const float *weight, const float *rstd,
                             const float *psi, const float *mean, const float *g_mean, const float *eta,
                             size tokens, size channels, int threads, float *dx)
{
    float *terms = malloc(3 * channels * sizeof(float));
    if (!terms)
        return 1;
    for (size c = 0; c < channels; c++) {
        float slope = -psi[c] * (rstd[c] * rstd[c]);
        terms[c] = weight[c] * rstd[c] + (eta ? *eta : 0);
        terms[channels + c] = slope;
        terms[2 * channels + c] = mean ? -g_mean[c] * rstd[c] - mean[c] * slope : 0;
    }
    threads = useful(threads, tokens * channels);
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        size thread = omp_get_thread_num(), start = share_end(tokens, thread - 1);
        for (size first, end = share_end(tokens, thread); end > start; end = first) {
            first = larger(start, end - BLOCK);
            combine_block(dy + first * channels, x + first * channels, terms, end - first, channels,
                          dx + first * channels);
        }
    }
    free(terms);
    return 0;
}

/* ---- the per-channel part of a step; a record is (window, channels), its oldest row first ---- */

/* The mean over `rows` of a record and one more, `newest`. */
VECTORIZED static void arithmetic_mean(const float *restrict record, const float *restrict newest, size rows,
                                       size channels, double *restrict am)
{
    for (size c = 0; c < channels; c++)
        am[c] = newest[c];
    for (size m = 0; m < rows; m++)
        for (size c = 0; c < channels; c++)
            am[c] += record[m * channels + c];
    for (size c = 0; c < channels; c++)
        am[c] /= rows + 1;
}

VECTORIZED static void multiply(const float *restrict record, size rows, size channels,
                                double *restrict product)
{
    for (size m = 0; m < rows; m++)
        for (size c = 0; c < channels; c++)
            product[c] *= record[m * channels + c];
}

VECTORIZED static void fourth_root(double *restrict values, size channels)
{
    for (size c = 0; c < channels; c++)
        values[c] = sqrt(sqrt(values[c]));
}

/* Of four rows, the usual window, without a logarithm. `scratch` is as long as `gm`. */
static void geometric_mean(const float *record, size window, size channels, double *gm, double *scratch)
{
    enum { FACTORS = 4 };  /* so many floats neither overflow nor underflow a double */
    for (size c = 0; c < channels; c++)
        gm[c] = 1;
    if (window == 1 || window == FACTORS) {
        multiply(record, window, channels, gm);
        if (window == FACTORS)
            fourth_root(gm, channels);
        return;
    }
    memset(scratch, 0, channels * sizeof(double));
    for (size m = 0; m < window; m += FACTORS) {
        multiply(record + m * channels, smaller(FACTORS, window - m), channels, gm);
        for (size c = 0; c < channels; c++) {
            scratch[c] += log(gm[c]);
            gm[c] = 1;
        }
    }
    for (size c = 0; c < channels; c++)
        gm[c] = exp(scratch[c] / window);
}

/* The unbiased variance of the roots, V of Eq. 19; not finite for one number. */
VECTORIZED static double root_variance(const float *record, size count, size stride)
{
    double roots = 0, values = 0;
    #pragma omp simd reduction(+ : roots, values)
    for (size i = 0; i < count; i++) {
        double root = sqrtf(record[i * stride]);
        roots += root;
        values += root * root;
    }
    double variance = (values - roots * roots / count) / (count - 1);
    return variance < 0 ? 0 : variance;
}

static inline float moving_average(double old, double newest, double alpha)
{
    return (float)(alpha * old + (1 - alpha) * newest);
}

/* inf - inf and NaN - NaN are NaN; unlike isfinite it is vectorized. */
static inline int is_finite(float value) { return value - value == 0; }

static void push(float *record, const float *newest, size window, size channels)
{
    memmove(record, record + channels, (window - 1) * channels * sizeof(float));
    memcpy(record + (window - 1) * channels, newest, channels * sizeof(float));
}

VECTORIZED static void take_finite(const float *restrict measured, const float *restrict otherwise,
                                   size channels, float *restrict s)
{
    for (size c = 0; c < channels; c++)
        s[c] = is_finite(measured[c]) ? measured[c] : otherwise[c];
}

/* Eq. 18; equal statistics have AM = GM and V = 0, and rounding must not decide there. */
VECTORIZED static int is_outlier(const double *restrict am, const double *restrict gm,
                                 const double *restrict variance, size window, size channels)
{
    int found = 0;
    for (size c = 0; c < channels; c++)
        found |= am[c] * (1 - 16 * 0x1p-23) > gm[c] + window * variance[c];
    return found;
}

/* The last step of advance; `average` is NULL for a step that is not averaged. */
VECTORIZED static void conclude(const float *restrict s, const double *restrict average, int is_ema,
                                double alpha, size channels, float *restrict var_hat,
                                float *restrict running_var)
{
    for (size c = 0; c < channels; c++) {
        var_hat[c] = average ? (float)average[c] : s[c];
        running_var[c] = moving_average(running_var[c], is_ema ? s[c] : var_hat[c], alpha);
    }
}

/* reference.advance. `record` is NULL where none is kept, `outliers` and `outlier` without the filter. The
   outputs are `s`, `var_hat`, `outlier` and `averaged`; running_var, record and outliers change. */
int advance(const float *measured, float *running_var, float *record, int64_t *outliers,
            const int64_t *step, size channels, size window, int average, int per_channel,
            int64_t unsettled, double alpha, float *s, float *var_hat, uint8_t *outlier, uint8_t *averaged)
{
    int settled = *step > unsettled, tests = outlier && settled, found = 0;
    int is_ema = average == EMA || average == EARLIER_EMA;
    double *am = malloc(4 * channels * sizeof(double)), *gm = am + channels, *variance = gm + channels;
    double *chosen = NULL;
    if (!am)
        return 1;
    if (tests) {
        double all = per_channel ? 0 : root_variance(record, window * channels, 1);
        for (size c = 0; c < channels; c++)
            variance[c] = per_channel ? root_variance(record + c, window, channels) : all;
    }
    take_finite(measured, running_var, channels, s);
    if (record)
        push(record, s, window, channels);
    if (settled && (tests || average == GM))
        geometric_mean(record, window, channels, gm, am);
    if (settled && (tests || average == AM))
        arithmetic_mean(record, s, window - 1, channels, am);
    if (tests)
        found = is_outlier(am, gm, variance, window, channels);
    *averaged = settled && !found;
    if (*averaged && average != CURRENT) {
        chosen = average == GM ? gm : am;
        for (size c = 0; is_ema && c < channels; c++)
            am[c] = average == EMA ? moving_average(running_var[c], s[c], alpha) : running_var[c];
    }
    if (outlier) {
        *outlier = found;
        *outliers += found;
        if (found)
            memcpy(record + (window - 1) * channels, running_var, channels * sizeof(float));
    }
    conclude(s, chosen, is_ema, alpha, channels, var_hat, running_var);
    free(am);
    return 0;
}

/* A step of average_gradient with psi by a moving average with `momentum`, or without (0). */
VECTORIZED static void estimate(float *restrict g, float *restrict psi, const double *restrict average,
                                int averaged, int changes, double momentum, size channels)
{
    for (size c = 0; c < channels; c++) {
        float own = is_finite(g[c]) ? g[c] : psi[c];
        float newest = moving_average(psi[c], averaged ? average[c] : own, momentum);
        psi[c] = changes ? newest : psi[c];
        g[c] = averaged ? newest : own;
    }
}

/* The same for PowerNorm's nu, which uses the psi before the step. */
static void estimate_nu(float *g, float *psi, const float *s, const float *var_hat, int averaged, int changes,
                        double alpha, double eps, size channels)
{
    for (size c = 0; c < channels; c++) {
        float own = is_finite(g[c]) ? g[c] : psi[c], used = psi[c];
        float newest = (float)(used * (1 - (1 - alpha) * (s[c] / (var_hat[c] + eps))) + (1 - alpha) * own);
        psi[c] = changes && is_finite(newest) ? newest : used;
        g[c] = averaged ? used : own;
    }
}

/* reference.average_gradient. `record` is NULL but for the arithmetic mean, `outlier` without the filter, `s`
   and `var_hat` but for NU; `g` is overwritten with what is used; psi and record change. */
int average_gradient(float *g, float *psi, float *record, const uint8_t *outlier, const uint8_t *averaged,
                     const float *s, const float *var_hat, size channels, size window, int average,
                     int momentum, double alpha, double eps)
{
    int finite = 1, is_outlier = outlier && *outlier;
    for (size c = 0; c < channels; c++)
        finite &= is_finite(g[c]);
    if (average == NU) {
        estimate_nu(g, psi, s, var_hat, *averaged, finite && !is_outlier, alpha, eps, channels);
        return 0;
    }
    double *mean = malloc(channels * sizeof(double));
    float *target = malloc(channels * sizeof(float));
    int failed = !mean || !target;
    if (!failed) {
        for (size c = 0; c < channels; c++)
            target[c] = is_outlier || !is_finite(g[c]) ? psi[c] : g[c];
        arithmetic_mean(record ? record + channels : NULL, target, record ? window - 1 : 0, channels, mean);
        if (record && finite)
            push(record, target, window, channels);
        estimate(g, psi, mean, *averaged, finite && !is_outlier, momentum ? alpha : 0, channels);
    }
    free(mean);
    free(target);
    return failed;
}

/* ---- a whole training step of a norm without a mean, each pass in one call ---- */

/* second_moment, advance for the next of `steps`, which it counts, and affine. The outputs are `measured`, those
   of advance, of which `s` may be NULL, `rstd` and `y`; in place change `steps` and what advance changes. */
int step_forward(const float *x, const float *weight, const float *bias, size tokens, size channels,
                 int threads, double eps, float *running_var, float *record, int64_t *outliers,
                 int64_t *steps, size window, int average, int per_channel, int64_t unsettled, double alpha,
                 float *measured, float *s, float *var_hat, uint8_t *outlier, uint8_t *averaged, float *rstd,
                 float *y)
{
    int64_t step = *steps + 1;
    float *scratch = malloc(channels * sizeof(float));
    int failed = !scratch || second_moment(x, tokens, channels, threads, measured)
        || advance(measured, running_var, record, outliers, &step, channels, window, average, per_channel,
                   unsettled, alpha, s ? s : scratch, var_hat, outlier, averaged);
    if (!failed) {
        *steps = step;
        for (size c = 0; c < channels; c++) {
            rstd[c] = 1 / sqrtf(var_hat[c] + (float)eps);
            scratch[c] = weight[c] * rstd[c];
        }
        affine(x, scratch, bias, tokens, channels, threads, y);
    }
    free(scratch);
    return failed;
}

/* normalize_backward, average_gradient and, where `dx` is not NULL, normalize_input_gradient. */
int step_backward(const float *dy, const float *x, const float *weight, const float *rstd, size tokens,
                  size channels, int threads, double eps, float *psi, float *record, const uint8_t *outlier,
                  const uint8_t *averaged, const float *s, const float *var_hat, size window, int average,
                  int momentum, double alpha, float *dweight, float *dbias, float *dx)
{
    float *g = malloc(channels * sizeof(float));
    int failed = !g || normalize_backward(dy, x, weight, rstd, NULL, tokens, channels, threads, dweight,
                                          dbias, g, NULL)
        || average_gradient(g, psi, record, outlier, averaged, s, var_hat, channels, window, average,
                            momentum, alpha, eps)
        || (dx && normalize_input_gradient(dy, x, weight, rstd, g, NULL, NULL, NULL, tokens, channels,
                                           threads, dx));
    free(g);
    return failed;
}
