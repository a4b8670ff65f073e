/* number.h - the one place where a double becomes text: the shortest that parses back to it, as Python prints it. */
#ifndef VERLC_BASE_NUMBER_H
#define VERLC_BASE_NUMBER_H

#define NUMBER_TEXT 32

/* "0.24", "1.0", "1e-06", "-0.0"; "nan", "inf", "-inf". Of the texts with the fewest digits the nearest to v. */
void number_text(double v, char out[NUMBER_TEXT]);
/* What a float is written as: the double of the shortest text that parses back to the float. Not finite: as it is. */
double number_of_f32(float v);

#endif
