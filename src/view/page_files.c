/* page_files.c - the page's files, which the program carries: what is served is what was built, wherever it lies.
 *
 * The sources are src/view/page; dygraphs draws the charts and comes from Debian's package libjs-dygraphs (CMakeLists.txt). */
#include "view/view.h"

#include <string.h>

#define JS "text/javascript; charset=utf-8"
#define CSS "text/css; charset=utf-8"
/* symbol, path of the request, file, type */
#define FILES(X)                                                              \
    X(index_html, "/", VIEW_PAGE "/index.html", "text/html; charset=utf-8")   \
    X(style_css, "/style.css", VIEW_PAGE "/style.css", CSS)                   \
    X(favicon_svg, "/favicon.svg", VIEW_PAGE "/favicon.svg", "image/svg+xml") \
    X(app_js, "/app.js", VIEW_PAGE "/app.js", JS)                             \
    X(data_js, "/data.js", VIEW_PAGE "/data.js", JS)                          \
    X(elements_js, "/elements.js", VIEW_PAGE "/elements.js", JS)              \
    X(chart_js, "/chart.js", VIEW_PAGE "/chart.js", JS)                       \
    X(metrics_js, "/metrics.js", VIEW_PAGE "/metrics.js", JS)                 \
    X(samples_js, "/samples.js", VIEW_PAGE "/samples.js", JS)                 \
    X(group_js, "/group.js", VIEW_PAGE "/group.js", JS)                       \
    X(run_pages_js, "/run_pages.js", VIEW_PAGE "/run_pages.js", JS)           \
    X(runs_js, "/runs.js", VIEW_PAGE "/runs.js", JS)                          \
    X(stats_js, "/stats.js", VIEW_PAGE "/stats.js", JS)                       \
    X(export_js, "/export.js", VIEW_PAGE "/export.js", JS)                    \
    X(notes_js, "/notes.js", VIEW_PAGE "/notes.js", JS)                       \
    X(compare_js, "/compare.js", VIEW_PAGE "/compare.js", JS)                 \
    X(scatter_js, "/scatter.js", VIEW_PAGE "/scatter.js", JS)                 \
    X(config_js, "/config.js", VIEW_PAGE "/config.js", JS)                    \
    X(prompt_js, "/prompt.js", VIEW_PAGE "/prompt.js", JS)                    \
    X(keys_js, "/keys.js", VIEW_PAGE "/keys.js", JS)                          \
    X(dygraph_js, "/dygraph.js", VIEW_DYGRAPHS "/dygraph.min.js", JS)         \
    X(dygraph_css, "/dygraph.css", VIEW_DYGRAPHS "/dygraph.min.css", CSS)

#define X(symbol, path, file, type)                                              \
    __asm__(".pushsection .rodata\n"                                             \
            "view__" #symbol ":\n.incbin \"" file "\"\nview__" #symbol "_end:\n" \
            ".popsection\n");                                                    \
    extern const char view__##symbol[], view__##symbol##_end[];
FILES(X)
#undef X

bool view_page_file(const char *path, struct http_reply *reply) {
#define X(symbol, at, source, content)                                       \
    if (strcmp(path, at) == 0) {                                             \
        reply->type = (content);                                             \
        reply->file = view__##symbol;                                        \
        reply->file_bytes = (size_t)(view__##symbol##_end - view__##symbol); \
        return true;                                                         \
    }
    FILES(X)
#undef X
    return false;
}
