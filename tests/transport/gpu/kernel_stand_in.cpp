// hpcpar/transport/gpu/kernels.cu for the host: what CUDA would give it, and a table of all its kernels.

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#define __device__
#define __forceinline__ inline

struct Place {
    unsigned int x;
};
static thread_local Place threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

template <class To, class From> static To bits_of(From from)
{
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static float __uint_as_float(unsigned int bits) { return bits_of<float>(bits); }
static unsigned int __float_as_uint(float value) { return bits_of<unsigned int>(value); }

#define ARITHMETIC(T)                                       \
    static T add(T a, T b) { return a + b; }                \
    static T subtract(T a, T b) { return a - b; }           \
    static T multiply(T a, T b) { return a * b; }           \
    static T divide(T a, T b) { return a / b; }             \
    static T lesser(T a, T b) { return a < b ? a : b; }     \
    static T greater(T a, T b) { return a > b ? a : b; }
ARITHMETIC(float)
ARITHMETIC(double)
static float to_float(double value) { return (float)value; }
static double to_double(float value) { return value; }

static float float_of_half(unsigned short half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, digits = half & 0x3ff;
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000 | digits << 13);
    if (exponent == 0)  // a multiple of 2^-24
        return __uint_as_float(sign | __float_as_uint((float)digits * 0x1p-24f));
    return __uint_as_float(sign | (exponent + 112) << 23 | digits << 13);
}

static unsigned short half_of_float(float value)
{
    const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7fff;
    if (magnitude >= 0x477ff000)  // 65520, halfway from the largest number to the next power of two
        return sign | 0x7c00;
    if (magnitude < 0x38800000)  // below 2^-14: the host's own addition rounds to multiples of 2^-24
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000);
    return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

static void store_words(void *memory, const unsigned int (&words)[4]) { memcpy(memory, words, sizeof words); }

#include "kernels.cu"

union Arguments {
    Fold fold;
    Convert convert;
};

typedef void Kernel(const Arguments &);

template <class Operation, class Element> static void run(const Arguments &arguments)
{
    fold_tiles<Operation, Element>(arguments.fold);
}

template <class Source, class Element> static void run_convert(const Arguments &arguments)
{
    convert_tiles<Source, Element>(arguments.convert);
}

#define ONE(op, dtype) {"-DOPERATION=op_" #op " -DELEMENT=element_" #dtype, run<op_##op, element_##dtype>},
#define PAIR(from, to)                                                                     \
    {"-DSOURCE_ELEMENT=element_" #from " -DELEMENT=element_" #to, run_convert<element_##from, element_##to>},
#define SIGNED(op) ONE(op, int8) ONE(op, int16) ONE(op, int32) ONE(op, int64)
#define UNSIGNED(op) ONE(op, uint8) ONE(op, uint16) ONE(op, uint32) ONE(op, uint64)
#define INTEGERS(op) SIGNED(op) UNSIGNED(op)
#define FLOATS(op) ONE(op, float16) ONE(op, bfloat16) ONE(op, float32) ONE(op, float64)
#define COMPLEX(op) ONE(op, complex64) ONE(op, complex128)

static const std::map<std::string, Kernel *> kernels = {
    INTEGERS(sum) FLOATS(sum) COMPLEX(sum)
    INTEGERS(product) FLOATS(product) COMPLEX(product)
    ONE(min, bool) INTEGERS(min) FLOATS(min)
    ONE(max, bool) INTEGERS(max) FLOATS(max)
    ONE(and, bool) INTEGERS(and)
    ONE(or, bool) INTEGERS(or)
    ONE(xor, bool) INTEGERS(xor)
    PAIR(float32, float16) PAIR(float32, bfloat16) PAIR(float64, float16) PAIR(float64, bfloat16)
    PAIR(float16, float32) PAIR(bfloat16, float32) PAIR(float16, float64) PAIR(bfloat16, float64)
};

struct Job {
    Kernel *kernel;
    Arguments arguments;
    unsigned int blocks;
};

extern "C" {

size_t size_of_fold() { return sizeof(Fold); }
size_t size_of_convert() { return sizeof(Convert); }

// A launch: what `run_job` does once, on whatever thread. NULL for a kernel that does not exist.
Job *new_job(const char *name, const void *arguments, size_t nbytes, unsigned int blocks)
{
    const auto found = kernels.find(name);
    if (found == kernels.end())
        return nullptr;
    Job *job = new Job{found->second, {}, blocks};
    memcpy(&job->arguments, arguments, nbytes);
    return job;
}

// Threads do not wait for each other in these kernels, so one may run after the other.
void run_job(Job *job)
{
    gridDim.x = job->blocks;
    for (blockIdx.x = 0; blockIdx.x < job->blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            job->kernel(job->arguments);
    delete job;
}
}
