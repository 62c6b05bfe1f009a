// Many pieces of memory become one: into = (sources[0] (op) sources[1] (op) ...) × factor ÷ divisor.
//
// Each element is read once from every source, all arithmetic on it is done in registers, and it is written
// once. A block works on tiles of 4 KiB, one 16-byte load per thread and source:
//
//      into       |..|----tile 0----|----tile 1----|----tile 2----|--rest--|
//                 head: up to the first 16-byte boundary, by block 0, element by element as the rest
//
// That needs every source at the same distance from a 16-byte boundary as `into`. Where they are not
// (`head` = NARROW), a thread takes as many elements of a tile one by one, a block's width apart, so that
// neighbouring threads still read neighbouring elements. `into` may be one of the sources: an element is
// read and written by the same thread.
//
// `convert` is the other kernel: into = source × factor ÷ divisor, as elements of another floating-point type.
//
// No header is needed. Compiled once per operation and element type, or pair of types, by
//      -DOPERATION=op_sum -DELEMENT=element_float16            fold
//      -DSOURCE_ELEMENT=element_float32 -DELEMENT=element_float16    convert

constexpr int THREADS = 256;
constexpr int SOURCES = 64;
constexpr int NARROW = -1;

// The argument of a launch, by value. transport/gpu/kernels.py has the same layout.
struct Fold {
    void *into;
    long long count;
    double factor;
    double divisor;
    int source_count;
    int head;
    const void *sources[SOURCES];
};

struct Convert {
    void *into;
    const void *source;
    long long count;
    double factor;
    double divisor;
};

// Arithmetic that is IEEE's whatever the compiler's options. CuPy compiles with -ftz=true, which takes the
// subnormal numbers from a float and with them most of bfloat16's; and a product and a sum would be fused.
// PTX that names its rounding and no .ftz is neither flushed nor fused.
// A compiler for the host gets these functions from whoever includes this file.
#ifdef __CUDACC__

#define BINARY(name, ptx, type, letter)                                              \
    __device__ __forceinline__ type name(type a, type b)                             \
    {                                                                                \
        type result;                                                                 \
        asm(ptx " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b));         \
        return result;                                                               \
    }
#define UNARY(name, ptx, to, to_letter, from, from_letter)                           \
    __device__ __forceinline__ to name(from a)                                       \
    {                                                                                \
        to result;                                                                   \
        asm(ptx " %0, %1;" : "=" to_letter(result) : from_letter(a));                \
        return result;                                                               \
    }

BINARY(add, "add.rn.f32", float, "f")
BINARY(add, "add.rn.f64", double, "d")
BINARY(subtract, "sub.rn.f32", float, "f")
BINARY(subtract, "sub.rn.f64", double, "d")
BINARY(multiply, "mul.rn.f32", float, "f")
BINARY(multiply, "mul.rn.f64", double, "d")
BINARY(divide, "div.rn.f32", float, "f")
BINARY(divide, "div.rn.f64", double, "d")
BINARY(lesser, "min.f32", float, "f")
BINARY(lesser, "min.f64", double, "d")
BINARY(greater, "max.f32", float, "f")
BINARY(greater, "max.f64", double, "d")
UNARY(to_float, "cvt.rn.f32.f64", float, "f", double, "d")
UNARY(to_double, "cvt.f64.f32", double, "d", float, "f")
UNARY(float_of_half, "cvt.f32.f16", float, "f", unsigned short, "h")
UNARY(half_of_float, "cvt.rn.f16.f32", unsigned short, "h", float, "f")

// 16 bytes at once: left to itself, nvcc 13 takes the store of a whole pack apart again.
__device__ __forceinline__ void store_words(void *memory, const unsigned int (&words)[4])
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(memory), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}

#endif

// The element types: how they lie in memory, and what is calculated in.

template <class T> struct Plain {
    using Stored = T;
    using Wide = T;
    static __device__ __forceinline__ T widen(T stored) { return stored; }
    static __device__ __forceinline__ T narrow(T wide) { return wide; }
};

template <class T> struct Complex {
    T real, imaginary;
};

using element_bool = Plain<unsigned char>;
using element_int8 = Plain<signed char>;
using element_int16 = Plain<short>;
using element_int32 = Plain<int>;
using element_int64 = Plain<long long>;
using element_uint8 = Plain<unsigned char>;
using element_uint16 = Plain<unsigned short>;
using element_uint32 = Plain<unsigned int>;
using element_uint64 = Plain<unsigned long long>;
using element_float32 = Plain<float>;
using element_float64 = Plain<double>;
using element_complex64 = Plain<Complex<float>>;
using element_complex128 = Plain<Complex<double>>;

struct element_float16 {
    using Stored = unsigned short;
    using Wide = float;
    static __device__ __forceinline__ float widen(Stored stored) { return float_of_half(stored); }
    static __device__ __forceinline__ Stored narrow(float wide) { return half_of_float(wide); }
};

// The upper half of a float. Rounded on its bits: the instruction for it is there from sm_80 on only.
struct element_bfloat16 {
    using Stored = unsigned short;
    using Wide = float;
    static __device__ __forceinline__ float widen(Stored stored)
    {
        return __uint_as_float((unsigned int)stored << 16);
    }
    static __device__ __forceinline__ Stored narrow(float wide)
    {
        const unsigned int bits = __float_as_uint(wide);
        if ((bits & 0x7fffffff) > 0x7f800000)
            return (bits >> 16) | 0x0040;  // a NaN stays one, whatever is cut off
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // a carry out of the digits goes to the exponent
    }
};

// The operations, for integers where nothing else is said. These wrap around: the low digits are the same
// in any width without a sign.

template <class T> __device__ __forceinline__ T add(T a, T b)
{
    return (T)((unsigned long long)a + (unsigned long long)b);
}
template <class T> __device__ __forceinline__ T multiply(T a, T b)
{
    return (T)((unsigned long long)a * (unsigned long long)b);
}
template <class T> __device__ __forceinline__ T lesser(T a, T b) { return a < b ? a : b; }
template <class T> __device__ __forceinline__ T greater(T a, T b) { return a > b ? a : b; }

template <class T> __device__ __forceinline__ Complex<T> add(Complex<T> a, Complex<T> b)
{
    return {add(a.real, b.real), add(a.imaginary, b.imaginary)};
}
template <class T> __device__ __forceinline__ Complex<T> multiply(Complex<T> a, Complex<T> b)
{
    return {subtract(multiply(a.real, b.real), multiply(a.imaginary, b.imaginary)),
            add(multiply(a.real, b.imaginary), multiply(a.imaginary, b.real))};
}

// Of two numbers of which one is not a number: that one, where the instruction would take the other.
#define OPERATION_ON_TWO(name, expression)                                           \
    struct op_##name {                                                               \
        template <class T> static __device__ __forceinline__ T of(T a, T b) { return expression; } \
    };
OPERATION_ON_TWO(sum, add(a, b))
OPERATION_ON_TWO(product, multiply(a, b))
OPERATION_ON_TWO(min, a != a ? a : b != b ? b : lesser(a, b))
OPERATION_ON_TWO(max, a != a ? a : b != b ? b : greater(a, b))
OPERATION_ON_TWO(and, a & b)
OPERATION_ON_TWO(or, a | b)
OPERATION_ON_TWO(xor, a ^ b)

// × factor and ÷ divisor, which is 1 for integers: these have the quotient of both as their factor.

__device__ __forceinline__ float times(float total, double factor) { return multiply(total, to_float(factor)); }
__device__ __forceinline__ double times(double total, double factor) { return multiply(total, factor); }
__device__ __forceinline__ float over(float total, double divisor) { return divide(total, to_float(divisor)); }
__device__ __forceinline__ double over(double total, double divisor) { return divide(total, divisor); }

template <class T> __device__ __forceinline__ Complex<T> times(Complex<T> total, double factor)
{
    return {times(total.real, factor), times(total.imaginary, factor)};
}
// As NumPy divides a complex number by a real one: by the product with the reciprocal.
template <class T> __device__ __forceinline__ Complex<T> over(Complex<T> total, double divisor)
{
    const T reciprocal = over((T)1, divisor);
    return {multiply(total.real, reciprocal), multiply(total.imaginary, reciprocal)};
}

// Truncated towards zero; what is out of range becomes the nearest number of the type.
template <class T> __device__ __forceinline__ T times(T total, double factor)
{
    constexpr bool has_sign = (T)-1 < (T)0;
    constexpr int digits = 8 * sizeof(T) - has_sign;
    constexpr T highest = (T)(~0ull >> (64 - digits));
    constexpr double beyond = 2.0 * (double)(1ull << (digits - 1));
    const double scaled = multiply((double)total, factor);
    if (scaled >= beyond)
        return highest;
    if (scaled <= (has_sign ? -beyond : 0.0))
        return (T)~highest;
    return (T)scaled;
}
template <class T> __device__ __forceinline__ T over(T total, double) { return total; }

// What a thread holds of a tile: 16 bytes of each source.

template <class T> struct Pack {
    static constexpr int LANES = 16 / sizeof(T);
    T lanes[LANES];
};

template <bool WIDE, class T>
__device__ __forceinline__ Pack<T> load(const void *memory, long long first, long long limit)
{
    const T *elements = (const T *)memory + first;
    Pack<T> pack{};
    if constexpr (WIDE) {
        const uint4 words = *(const uint4 *)elements;
        memcpy(&pack, &words, sizeof pack);
    } else {
#pragma unroll
        for (int lane = 0; lane < Pack<T>::LANES; ++lane)
            if (first + lane * THREADS < limit)
                pack.lanes[lane] = elements[lane * THREADS];
    }
    return pack;
}

template <bool WIDE, class T>
__device__ __forceinline__ void store(void *memory, long long first, long long limit, const Pack<T> &pack)
{
    T *elements = (T *)memory + first;
    if constexpr (WIDE) {
        unsigned int words[4];
        memcpy(words, &pack, sizeof words);
        store_words(elements, words);
    } else {
#pragma unroll
        for (int lane = 0; lane < Pack<T>::LANES; ++lane)
            if (first + lane * THREADS < limit)
                elements[lane * THREADS] = pack.lanes[lane];
    }
}

// The packs of COUNT sources into the total, their loads under way together.
template <class Operation, class Element, bool WIDE, int COUNT>
__device__ __forceinline__ void take(typename Element::Wide *total, const Fold &fold, int source,
                                     long long first, long long limit)
{
    using Stored = typename Element::Stored;
    Pack<Stored> packs[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        packs[i] = load<WIDE, Stored>(fold.sources[source + i], first, limit);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int lane = 0; lane < Pack<Stored>::LANES; ++lane)
            total[lane] = Operation::of(total[lane], Element::widen(packs[i].lanes[lane]));
}

// A pack from every source, folded.
template <class Operation, class Element, bool WIDE>
__device__ __forceinline__ void fold_pack(const Fold &fold, long long first, long long limit)
{
    using Stored = typename Element::Stored;
    using Wide = typename Element::Wide;
    constexpr int LANES = Pack<Stored>::LANES;

    Wide total[LANES];
    Pack<Stored> pack = load<WIDE, Stored>(fold.sources[0], first, limit);
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane)
        total[lane] = Element::widen(pack.lanes[lane]);
    int source = 1;
    if constexpr (WIDE) {
#pragma unroll 1
        for (; source + 4 <= fold.source_count; source += 4)
            take<Operation, Element, WIDE, 4>(total, fold, source, first, limit);
        if (source + 2 <= fold.source_count) {
            take<Operation, Element, WIDE, 2>(total, fold, source, first, limit);
            source += 2;
        }
    }
#pragma unroll 1
    for (; source < fold.source_count; ++source)
        take<Operation, Element, WIDE, 1>(total, fold, source, first, limit);
    if (fold.factor != 1.0) {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            total[lane] = times(total[lane], fold.factor);
    }
    if (fold.divisor != 1.0) {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            total[lane] = over(total[lane], fold.divisor);
    }
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane)
        pack.lanes[lane] = Element::narrow(total[lane]);
    store<WIDE, Stored>(fold.into, first, limit, pack);
}

template <class Operation, class Element> __device__ __forceinline__ void fold_tiles(const Fold &fold)
{
    constexpr int LANES = Pack<typename Element::Stored>::LANES;
    constexpr int TILE = THREADS * LANES;
    const bool wide = fold.head != NARROW;
    const long long head = wide ? fold.head : 0;

    if (head && blockIdx.x == 0)
        fold_pack<Operation, Element, false>(fold, threadIdx.x, head);
    for (long long start = head + (long long)blockIdx.x * TILE; start < fold.count;
         start += (long long)gridDim.x * TILE) {
        if (wide && start + TILE <= fold.count)
            fold_pack<Operation, Element, true>(fold, start + threadIdx.x * LANES, fold.count);
        else
            fold_pack<Operation, Element, false>(fold, start + threadIdx.x, fold.count);
    }
}

__device__ __forceinline__ void assign(float &to, float from) { to = from; }
__device__ __forceinline__ void assign(float &to, double from) { to = to_float(from); }
__device__ __forceinline__ void assign(double &to, float from) { to = to_double(from); }
__device__ __forceinline__ void assign(double &to, double from) { to = from; }

// Elements that a thread converts at a time, a block's width apart, so that neighbours read neighbours.
constexpr int CONVERTED = 8;

template <class Source, class Element> __device__ __forceinline__ void convert_tiles(const Convert &convert)
{
    using Wide = decltype(typename Source::Wide() + typename Element::Wide());
    const auto *__restrict__ source = (const typename Source::Stored *)convert.source;
    auto *__restrict__ into = (typename Element::Stored *)convert.into;

    for (long long start = (long long)blockIdx.x * THREADS * CONVERTED; start < convert.count;
         start += (long long)gridDim.x * THREADS * CONVERTED) {
#pragma unroll
        for (int lane = 0; lane < CONVERTED; ++lane) {
            const long long at = start + lane * THREADS + threadIdx.x;
            if (at >= convert.count)
                break;
            Wide value;
            assign(value, Source::widen(source[at]));
            if (convert.factor != 1.0)
                value = times(value, convert.factor);
            if (convert.divisor != 1.0)
                value = over(value, convert.divisor);
            typename Element::Wide narrower;
            assign(narrower, value);
            into[at] = Element::narrow(narrower);
        }
    }
}

#ifdef SOURCE_ELEMENT
extern "C" __global__ void __launch_bounds__(THREADS) convert(const Convert arguments)
{
    convert_tiles<SOURCE_ELEMENT, ELEMENT>(arguments);
}
#endif

#ifdef OPERATION
extern "C" __global__ void __launch_bounds__(THREADS) fold(const Fold arguments)
{
    fold_tiles<OPERATION, ELEMENT>(arguments);
}
#endif
